from tests.devtools.fixtures import cloud

__all__ = ["cloud"]
