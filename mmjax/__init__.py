"""mmjax: train multimodal LLMs in JAX with every phase of every step full and balanced."""

__version__ = "0.1.0"
