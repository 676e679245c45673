"""Scenes in three families of chat templates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chat_families import FAMILIES, Scene, chat_of


@pytest.fixture(scope="session")
def make_scene(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scene]:
    """A new episode in a family."""
    chats = {family: chat_of(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}
    return lambda family: Scene(family, chats[family])
