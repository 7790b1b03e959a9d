"""`python -m harness.peers.child NAME OPTIONS`: one other system in a process of its own, so that its threads
and its allocator are its own. torch, transformers and vLLM are imported here and nowhere else in harness.

Standard input has a JSON line for each round, {"prompts", "outputs"}; standard output answers with
{"seconds", "answers"}, after a first line that says what is ready. What libraries print goes to standard
error."""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Answer = Callable[[list[list[int]], list[int]], list[list[int]]]
PAGE_TOKENS = 32


def main() -> int:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    rounds: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(rounds,), daemon=True).start()
    try:
        answer, about = SYSTEMS[name](options)
        tell({"ready": name, **about})
        while True:
            asked = json.loads(rounds.get())
            start = time.perf_counter()
            given = answer(asked["prompts"], asked["outputs"])
            tell({"seconds": time.perf_counter() - start, "answers": given})
    except Exception as error:
        tell({"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
    return 1


def _listen(rounds: queue.Queue[str]) -> None:
    """The end of standard input is the end of the parent: also in the middle of a round."""
    for line in sys.stdin:
        rounds.put(line)
    os._exit(0)


def _transformers_model(options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The checkpoint as transformers loads it, in options["dtype"] on options["threads"] threads."""
    import torch

    from engines.model.transformers_import import import_transformers

    transformers = import_transformers()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(options["threads"])
    dtype = getattr(torch, options["dtype"])
    if options["folder"] is None:
        from engines.model.random_weights import TINY, tiny_weights

        config = transformers.AutoConfig.for_model(**TINY.to_hf())
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model.load_state_dict(tiny_weights(options["seed"]))
        model = model.to(dtype).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options["folder"], dtype=dtype, attn_implementation="sdpa"
        ).eval()
    # The answer's length belongs to the comparison: no token ends it.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model, {
        "version": transformers.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def generate(options: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """transformers' static batching: prompts padded on the left to the longest, every row computed until the
    longest answer of its batch has ended. Of a row, the tokens that were asked for count."""
    import torch

    model, about = _transformers_model(options)

    def answer(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        given: list[list[int]] = []
        for first in range(0, len(prompts), options["streams"]):
            rows = prompts[first : first + options["streams"]]
            wanted = outputs[first : first + options["streams"]]
            width, longest = max(map(len, rows)), max(wanted)
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
            )
            given += [row[width : width + n].tolist() for row, n in zip(out, wanted, strict=True)]
        return given

    return answer, about


def generate_batch(options: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """transformers' continuous batching, as `generate_batch` drives it, with a length for each request. The
    manager lives from round to round."""
    from transformers import ContinuousBatchingConfig

    model, about = _transformers_model(options)
    room = -(-options["max_model_len"] // PAGE_TOKENS) + 1
    manager = model.init_continuous_batching(
        generation_config=model.generation_config,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=room * options["streams"],
            max_batch_tokens=options["max_batch_tokens"],
            max_requests_per_batch=options["streams"],
            allow_block_sharing=False,
        ),
    )
    manager.start()

    def answer(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        names = [
            manager.add_request(prompt, max_new_tokens=n, eos_token_id=-1)
            for prompt, n in zip(prompts, outputs, strict=True)
        ]
        given: dict[str, list[int]] = {}
        while len(given) < len(names):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the generation thread of transformers has ended")
            elif result.error:
                raise RuntimeError(result.error)
            elif result.is_finished():
                given[result.request_id] = list(result.generated_tokens)
        return [given[name] for name in names]

    return answer, about


def vllm(options: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """vLLM's offline class: no HTTP, hence a bound on what its server does."""
    if options["folder"] is None:
        raise ValueError("vLLM loads a checkpoint: use --model smollm2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options['threads'] - 1}")
    module = importlib.import_module("vllm")
    model = module.LLM(
        model=options["folder"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        max_num_seqs=options["streams"],
        enable_prefix_caching=False,
    )

    def answer(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        limits = [
            module.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in outputs
        ]
        made = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], limits, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in made]

    return answer, {"version": module.__version__, "threads": options["threads"]}


SYSTEMS: dict[str, Callable[[dict[str, Any]], tuple[Answer, dict[str, Any]]]] = {
    "generate": generate,
    "generate_batch": generate_batch,
    "vllm": vllm,
}

if __name__ == "__main__":
    # Some libraries end with threads that wait for ever.
    code = main()
    sys.stderr.flush()
    os._exit(code)
