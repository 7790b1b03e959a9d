"""Our engines beside other systems on this very machine: the same weights, prompts and output lengths, in
interleaved rounds of one run."""
