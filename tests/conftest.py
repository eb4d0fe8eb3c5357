"""Eight CPU devices for every test, and the shapes written in the models' annotations checked at every call."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jaxtyping

jax.config.update("jax_num_cpu_devices", 8)
jaxtyping.install_import_hook("mmjax.models", "beartype.beartype")
