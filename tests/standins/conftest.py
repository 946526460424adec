from tests.standins.fixtures import cloud

__all__ = ["cloud"]
