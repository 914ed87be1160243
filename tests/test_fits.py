"""How much fits: the formula against what was measured, and the page that has its table."""

from benchmarks.training import fits


def test_the_formula_is_near_what_was_measured():
    rows = list(fits.measured())
    assert len(rows) == 28
    for name, model, setting, tokens, tensors, device in rows:
        assert 0.98 < sum(fits.tensors(model, setting, tokens)) / fits.GIB / tensors < 1.07, name
        low = 0.81 if ": 4k" in name else 0.86
        assert low < fits.device(model, setting, tokens) / fits.GIB / device < 1.1, name


def test_parameters_are_those_of_the_models():
    """By their configurations: 0.836, 1.236, 8.19 and 32.8 billion."""
    found = [round(model.parameters / 1e9, 2) for model in (fits.MEASURED, *fits.MODELS.values())]
    assert found == [0.84, 1.24, 8.19, 32.76]


def test_the_page_has_the_table():
    page = fits.PAGE.read_text(encoding="utf-8")
    assert fits.written(page) == page, "python -m benchmarks.training.fits --write writes the table anew"
