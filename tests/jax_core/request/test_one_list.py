"""Every signature and table that names the settings of a call has all of ``Settings``, with its defaults."""

import re
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from typing import get_type_hints

import jax_core
import jax_core.api.arguments as of_jax
import ring_attn
from jax_core.integrations.settings import RingSettings
from jax_core.options import Options, Settings
from ring_attn.functional import NAMES, AttentionOptions

DOCUMENT = (Path(__file__).parents[3] / "docs" / "reference.md").read_text(encoding="utf-8")
DEFAULTS = {field.name: field.default for field in fields(Settings)}
# Where a face has no such argument, and why.
NOT_IN_TORCH = {"precision": "the highest"}
NOT_IN_MODULE = NOT_IN_TORCH | {"bottom_right": "a layer's queries and keys begin together"}
PLATFORM = {"platform": "auto"}  # what None of JAX's is called in torch


def defaults(function, names):
    given = signature(function).parameters
    return {name: given[name].default for name in names if name in given and given[name].default is not Parameter.empty}


def in_torch(without):
    names = {name: NAMES.get(name, name) for name in DEFAULTS if name not in without}
    return {names[name]: default for name, default in (DEFAULTS | PLATFORM).items() if name in names}


def test_the_function_of_jax():
    assert defaults(jax_core.ring_attention, DEFAULTS) == DEFAULTS
    assert {*DEFAULTS, "dropout_prob"} == {*get_type_hints(of_jax._Static), "sliding_window"}


def test_the_function_of_torch():
    expected = in_torch(NOT_IN_TORCH)
    assert defaults(ring_attn.ring_attention, expected) == expected
    keywords = {*signature(ring_attn.ring_attention).parameters} - {"q", "k", "v", "return_lse"}
    assert {*AttentionOptions.__annotations__} == keywords


def test_the_module():
    expected = in_torch(NOT_IN_MODULE)
    assert defaults(ring_attn.RingAttention, expected) == expected


def test_layers_of_jax_and_calls_inherit_it():
    for kind in (RingSettings, Options):
        assert DEFAULTS.items() <= {field.name: field.default for field in fields(kind)}.items()
    assert RingSettings(deterministic=True, bottom_right=True).deterministic


def test_the_table_of_the_documents():
    """Names of JAX stand in brackets behind torch's; without any they are the same."""
    cells = [line.split("|")[2] for line in DOCUMENT.splitlines() if line.startswith("| ") and line.count("|") > 4]
    in_brackets = r"\((`[^)]*`)\)"
    jax = named(text for cell in cells for text in re.findall(in_brackets, cell))
    torch = named(re.sub(in_brackets, "", cell) for cell in cells)
    assert set(DEFAULTS) & set(NAMES) <= jax
    assert set(DEFAULTS) <= torch | jax
    assert set(in_torch(NOT_IN_TORCH)) <= torch


def named(texts):
    return {word.split("=")[0] for text in texts for word in text.split("`")[1::2]}
