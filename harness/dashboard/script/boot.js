// Unpacks plotly.js and the data (gzip in base64: a page of 10,000 requests stays small), then starts the page.
(async () => {
  const inflate = async (id) => {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const run = (text) => { const element = document.createElement("script"); element.textContent = text; document.body.append(element); };
  try {
    const [plotly, data] = await Promise.all([inflate("plotly"), inflate("data")]);
    run(plotly);
    window.DATA = JSON.parse(data);
    window.FIGURES = window.DATA.figures;
    run(document.getElementById("script").textContent);
  } catch (error) {
    const broken = document.getElementById("broken");
    broken.textContent = `The charts cannot be drawn: ${error}. They need a browser of 2023 or later (DecompressionStream).`;
    broken.hidden = false;
  }
})();
