"""Case classes: every implementation of an operation is a subclass of the operation's cases."""

import pytest

for _base in ("lightning_indexer", "topk", "index_topk", "sparse_mla"):
    pytest.register_assert_rewrite(f"tests.kernels.base_{_base}")
pytest.register_assert_rewrite("tests.kernels.oracle")


def pytest_generate_tests(metafunc):
    """Parametrise by the class's `axes`, which a subclass narrows to the shapes its implementation supports."""
    for name, values in getattr(metafunc.cls, "axes", {}).items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values)
