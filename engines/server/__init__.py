"""The HTTP server of the reference engines: OpenAI-compatible, one process, the engine loop in a thread of
its own."""
