"""Commands of `python -m jax_intranode` that look at an installation and a node."""

from jax_intranode._src.wrong_input import WrongInput as WrongInput
