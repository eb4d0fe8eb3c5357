"""mmjax: train multimodal LLMs in JAX, with rows packed and ranks balanced in every phase of a step."""

__version__ = "0.1.0"
