"""Nothing is executed unless the caller asks for it."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import s4weights
from compare import assert_identical


class Trainer:
    def __init__(self) -> None:
        self.step = 3


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def refusal(obj: Any, path: Path) -> s4weights.UnsafeLoadError:
    s4weights.save(obj, path)
    with pytest.raises(s4weights.UnsafeLoadError) as caught:
        s4weights.load(path)
    assert isinstance(caught.value, (pickle.UnpicklingError, s4weights.S4Error))
    return caught.value


NUMPY_SCALAR = "numpy._core.multiarray.scalar"


@pytest.mark.parametrize(
    ("obj", "key_path", "name"),
    [
        (Trainer(), "", f"{__name__}.Trainer"),
        ({"a": torch.ones(1), "trainer": Trainer()}, "trainer", f"{__name__}.Trainer"),
        ({"opt": {"groups": [{"lr": 1}, {"lr": np.float64(2)}]}}, "opt.groups.1.lr", NUMPY_SCALAR),
        ([1, ({"x": [Trainer()]}, 2)], "1.0.x.0", f"{__name__}.Trainer"),
        ({"one": {"two": {"three": np.float32(1)}}}, "one.two.three", NUMPY_SCALAR),
        (OrderedDict(a={}, b=OrderedDict(c=frozenset())), None, None),
        ({"a": OrderedDict(b=[1, range(2)])}, "a.b.1", "builtins.range"),
        ({i: [np.int64(i)] for i in range(1500)}, "0.0", NUMPY_SCALAR),
        ({**{i: i for i in range(1500)}, "last": slice(1)}, "last", "builtins.slice"),
        ([*range(2500), slice(1)], "2500", "builtins.slice"),
        ({(1, "a"): slice(1)}, "(1, a)", "builtins.slice"),
        ({None: [1.5, slice(1)]}, "None.1", "builtins.slice"),
        ({Trainer: 1}, "", f"{__name__}.Trainer"),
    ],
    ids=str,
)
def test_the_key_path_is_named(obj: Any, key_path: str | None, name: str, path: Path) -> None:
    if key_path is None:  # An object that is not refused.
        s4weights.save(obj, path)
        assert_identical(obj, s4weights.load(path))
        return
    error = refusal(obj, path)
    assert (error.key_path, error.global_name) == (key_path, name)
    assert (name in str(error) and f"`{key_path}`" in str(error)) or not key_path
    assert "weights_only=False" in str(error) and "add_safe_globals" in str(error)


def test_all_offenders_are_named(path: Path) -> None:
    error = refusal({"rng": np.random.RandomState(1).get_state(), "t": Trainer()}, path)
    assert "`rng.1`" in str(error) and "`t`" in str(error) and "Trainer" in str(error)


def test_protocol_4_is_refused_with_the_key_path(path: Path) -> None:
    s4weights.save({"t": {"u": Trainer()}}, path, pickle_protocol=4)
    with (
        pytest.warns(UserWarning, match="protocol 4"),
        pytest.raises(s4weights.UnsafeLoadError) as e,
    ):
        s4weights.load(path)
    assert e.value.key_path == "t.u"
    assert s4weights.load(path, weights_only=False)["t"]["u"].step == 3


def test_code_is_not_run_when_refused(path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    error = refusal({"config": Bomb(str(trace))}, path)
    assert (error.key_path == "config" and "posix.mkdir" in str(error)) or os.name == "nt"
    assert not trace.exists()
    s4weights.load(path, weights_only=False)
    assert trace.exists()


def test_safe_globals_are_honoured(path: Path) -> None:
    s4weights.save({"t": Trainer(), "c": range(3)}, path)
    with torch.serialization.safe_globals([Trainer, range]):
        assert s4weights.load(path)["t"].step == 3
    with pytest.raises(s4weights.UnsafeLoadError):
        s4weights.load(path)


def test_blocked_modules_stay_blocked(path: Path, tmp_path: Path) -> None:
    s4weights.save({"config": Bomb(str(tmp_path / "executed"))}, path)
    with (
        torch.serialization.safe_globals([os.mkdir]),
        pytest.raises(s4weights.UnsafeLoadError, match="cannot be allowed") as caught,
    ):
        s4weights.load(path)
    assert "add_safe_globals" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


def test_what_no_list_of_globals_would_help_is_not_sent_there(path: Path) -> None:
    # PyTorch's restricted unpickler reads protocol 2.
    s4weights.save({"trainer": Trainer()}, path, pickle_protocol=5)
    words = r"pickle_protocol=2(.|\n)*file an issue with the following so that we can make `weights_only=True`"
    with (
        torch.serialization.safe_globals([Trainer]),
        pytest.warns(UserWarning, match="pickle protocol 5"),
        pytest.raises(s4weights.UnsafeLoadError, match=words) as caught,
    ):
        s4weights.load(path)
    assert "add_safe_globals" not in str(caught.value)
    assert s4weights.load(path, weights_only=False)["trainer"].step == 3


def test_numpy_state_with_the_globals_that_it_needs(path: Path) -> None:
    state = np.random.RandomState(3).get_state()
    s4weights.save({"numpy": state}, path)
    needed = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.UInt32DType]
    with torch.serialization.safe_globals(needed):
        loaded = s4weights.load(path)["numpy"]
    assert loaded[0] == state[0] and (loaded[1] == state[1]).all() and loaded[2:] == state[2:]


def test_environment_variables(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s4weights.save(Trainer(), path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    # In PyTorch's words, since programs filter by them.
    words = r"Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD detected.*forcing weights_only=False"
    with pytest.warns(UserWarning, match=words):
        assert s4weights.load(path).step == 3
    with pytest.raises(s4weights.UnsafeLoadError):
        s4weights.load(path, weights_only=True)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "yes")
    with pytest.raises(RuntimeError, match="both were set"):
        s4weights.load(path)
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    with pytest.raises(s4weights.UnsafeLoadError):
        s4weights.load(path, weights_only=False)


class CountingPickle:
    """A pickle module that counts what it makes."""

    made: ClassVar[list[str]] = []

    class Pickler(pickle.Pickler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            CountingPickle.made.append("pickler")
            super().__init__(*args, **kwargs)

    class Unpickler(pickle.Unpickler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            CountingPickle.made.append(f"unpickler {kwargs}")
            super().__init__(*args, **kwargs)


def test_pickle_module(path: Path) -> None:
    CountingPickle.made = []
    s4weights.save(Trainer(), path, CountingPickle, 3)
    assert s4weights.load(path, None, CountingPickle, encoding="latin1").step == 3
    assert CountingPickle.made == ["pickler", "unpickler {'encoding': 'latin1'}"]
    with pytest.raises(RuntimeError, match="pickle_module"):
        s4weights.load(path, pickle_module=CountingPickle, weights_only=True)


def test_arguments_for_the_unpickler_are_useless_with_weights_only(path: Path) -> None:
    s4weights.save([torch.ones(1)], path)
    with pytest.warns(UserWarning, match="weights_only=False"):
        s4weights.load(path, encoding="ascii")


def test_what_cannot_be_pickled_raises_as_torch_does(path: Path) -> None:
    for obj in (lambda: 0, {"f": (i for i in ())}, [io.StringIO]):
        try:
            torch.save(obj, io.BytesIO())
        except Exception as error:
            with pytest.raises(type(error)) as caught:
                s4weights.save(obj, path)
            assert str(caught.value).split("<")[0] == str(error).split("<")[0]
            assert caught.value.__context__ is None or "NotPlain" not in repr(
                caught.value.__context__
            )
            assert not path.exists()
        else:
            s4weights.save(obj, path)


def test_an_error_can_be_pickled() -> None:
    error = s4weights.UnsafeLoadError("no", key_path="a.b", global_name="x.y")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.key_path, again.global_name) == ("no", "a.b", "x.y")
