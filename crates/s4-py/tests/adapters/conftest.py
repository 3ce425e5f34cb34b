"""Fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import run_victims


@pytest.fixture(scope="session")
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What killed runs left behind: each (function, name) of a module's ``VICTIMS`` runs in the
    folder ``module/name``. One process imports what all of them need, since importing takes longer
    than the runs.
    """
    folder = tmp_path_factory.mktemp("killed")
    modules = {item.module: None for item in request.session.items}  # type: ignore[attr-defined]
    run_victims(
        *(
            (module.__name__, work.__name__, str(folder / module.__name__ / name), name)
            for module in modules
            for work, name in getattr(module, "VICTIMS", [])
        )
    )
    return folder
