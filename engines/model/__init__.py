"""Models: configurations, tokenizers, weights, and two implementations behind one forward."""
