"""The HTTP server of the reference engines: OpenAI-compatible, with the engine in a process of its own."""
