"""The detector: a model in segments, preprocess, postprocess, and the backends that run it."""
