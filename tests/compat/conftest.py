"""The tiny target and the chats of the tests of the command."""

from tests.precompute.conftest import chats, llama, unsynced

__all__ = ["chats", "llama", "unsynced"]
