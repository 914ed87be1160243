"""Every signature and table that names the settings of a call has all of ``Settings``, with its defaults."""

from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from typing import get_type_hints

import jax_core
import jax_core.api.attention as of_jax
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
    rows = [line.split("|") for line in DOCUMENT.splitlines() if line.startswith("| ") and line.count("|") > 4]
    torch, jax = ({word.split("=")[0] for row in rows for word in row[column].split("`")[1::2]} for column in (2, 3))
    same = {word.split("=")[0] for row in rows if "the same" in row[3] for word in row[2].split("`")[1::2]}
    assert set(DEFAULTS) <= jax | same
    assert set(in_torch(NOT_IN_TORCH)) <= torch
