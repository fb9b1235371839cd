"""Transforms of samples: functions of the user whose result is what a batch holds.

A transform gets a sample as a dict: the values of the fields, and ``__key__``, ``__facts__`` and ``__rng__``,
a generator that depends on run seed, epoch and sample alone, so that the result is the same on any number of
ranks, threads and processes, and after a resume. What it returns is used::

    def jitter(sample):
        sample["image"] = sample["image"] + sample["__rng__"].normal(0, 5, sample["image"].shape)
        return sample

Each loader thread has its own copy. An error in a transform ends the run; it does not mask the sample.
"""

from __future__ import annotations

import copy
import importlib
import io
import random
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, TypeAlias

import numpy as np

from shardflow.errors import ConfigError, SampleError, ShardflowError
from shardflow.fields.adapters import LibraryTransform, adapted
from shardflow.fields.field import DrawKey, Field
from shardflow.fields.outputs import CollatedBatch, OutputContract, declared_contract, probed_contract
from shardflow.format.keys import sha256_hex

Step: TypeAlias = Callable[[dict[str, Any]], Any]
"""One transform: gets a sample, returns a sample."""
RESERVED_ENTRIES: Final = ("__key__", "__facts__", "__rng__")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
_MAX_DEPTH: Final = 12
_NAME: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class SampleTransform:
    """Transform of a loader: its steps, what they return, and what they collate. Safe for many threads.

    Args:
        transform: A callable, the name of one (``"package.module:name"``), or a list of them; None for none.
        collate: Gets the list of the transformed samples of a micro-batch, and returns what it holds.
        outputs: Declared output contract, see `declared_contract`; or the contract of another process, which
            is taken as it is; None probes.
        specs: Fields of a sample, for steps that convert by type.
        example: Makes the synthetic samples of a probe; gets whether to give them other sizes.
        varies: Whether the sizes of samples differ.
        facts: Returns the facts of the series of a sample, by component and row of its dataset's own table.
        digests: Digests of the tables behind ``facts``.

    Attributes:
        contract: What the steps return for each sample.
        given: The arguments with which another process makes the same transform.

    Raises:
        ConfigError: The transform cannot be imported, copied or called, returns what a batch cannot hold, or
            returns None.
    """

    def __init__(
        self,
        transform: Any,
        collate: Any,
        outputs: Mapping[str, Any] | OutputContract | None,
        *,
        specs: Mapping[str, Field],
        example: Callable[[bool], dict[str, Any]],
        varies: bool,
        facts: Callable[[int, int], list[dict[str, Any]]],
        digests: Sequence[str] = (),
    ) -> None:
        listed = (
            [] if transform is None else transform if isinstance(transform, list | tuple) else [transform]
        )
        self._originals = [adapted(_resolve(one, "transform"), specs) for one in listed]
        self._collate: Any = None if collate is None else _resolve(collate, "collate")
        self._facts, self._digests = facts, digests
        self._local = threading.local()
        self.names = [_short_name(step) for step in self._originals]
        self._source = f"The transform {self.names[-1]}" if self.names else "The fields"
        self._check_copies()
        if isinstance(outputs, OutputContract):
            self.contract = outputs
        else:
            self.contract = self._probe(outputs, example, varies=varies)
        self.given: dict[str, Any] = {
            "transform": transform,
            "collate": collate,
            "outputs": self.contract,
        }

    @property
    def has_collate(self) -> bool:
        """Whether samples are collated by a function of the user."""
        return self._collate is not None

    def identity(self) -> dict[str, Any]:
        """Return names and parameters of the functions, which are equal in every process."""
        found: dict[str, Any] = {"steps": [identity_of(step) for step in self._originals]}
        if self._collate is not None:
            found["collate"] = identity_of(self._collate)
        if self._digests:
            found["facts"] = list(self._digests)
        return found

    def given_names(self) -> tuple[tuple[str, ...], str]:
        """Return the names ``package.module:name`` of the transforms and of ``collate``, for other machines.

        Raises:
            ConfigError: One was given as an object that its name does not lead to.
        """
        given = self.given["transform"]
        listed = [] if given is None else given if isinstance(given, list | tuple) else [given]
        collate = self.given["collate"]
        return tuple(map(_importable_name, listed)), "" if collate is None else _importable_name(collate)

    def executions(self) -> tuple[str, ...]:
        """Return in which executions of a loader the transform is reproducible."""
        if self.contract.generators:
            return ("workers",) if self._portability() is None else ()
        return ("threads", "process", "workers") if self._portability() is None else ("threads",)

    def check_execution(self, execution: str) -> None:
        """Refuse an execution in which the transform cannot run, or whose results would not be reproducible.

        Raises:
            ConfigError: It draws from a process-global generator and the execution is not ``workers``, or it
                cannot be sent to another process.
        """
        if self.contract.generators and execution != "workers":
            named = " and ".join(self.contract.generators)
            raise ConfigError(
                f"The transform {', '.join(self.names)} draws from the process-global generator of {named}, "
                "which loader threads share, so that no run could be repeated; draw from sample['__rng__'], "
                "or set LoaderConfig(execution='workers'), where each process seeds it for each sample."
            )
        problem = self._portability()
        if execution not in ("threads", "service") and problem is not None:
            raise ConfigError(
                f"{problem} cannot be sent to the loader processes of execution={execution!r}; define it in "
                "a module that can be imported and pass it, or its name 'package.module:name', or set "
                "execution='threads'."
            )

    # ---- samples ---------------------------------------------------------------------------------

    def run(
        self, sample: Mapping[str, Any], key: str, draw: DrawKey, component: int, row: int
    ) -> dict[str, Any]:
        """Return what the steps return for a sample, as it is stored.

        Args:
            sample: Values of the fields, which may be changed.
            key: Of the sample.
            draw: Key of its random choices.
            component: Of a blend; 0 without a blend.
            row: Row of its dataset's own table.

        Raises:
            SampleError: A step failed, or its result deviates from the contract.
        """
        if self.contract.generators:
            _seed_generators(self.contract.generators, draw.derive("transform-globals"))
        rng = np.random.Generator(np.random.Philox(key=draw.derive("transform")))
        found = self._call(self._own()[0], sample, key, self._facts(component, row), rng)
        return self.contract.check(found, f"{self._source}, for sample {key},")

    def collate(self, samples: list[dict[str, Any]], place: str) -> CollatedBatch:
        """Return what the user's function makes of the samples of a micro-batch.

        Args:
            samples: For each slot its entries; those of the contract's `blank` where there is no sample.
            place: Name of the micro-batch, for messages.

        Raises:
            SampleError: The function failed, or a batch cannot hold its result.
        """
        function = self._own()[1]
        where = f"collate={_short_name(self._collate)}, for {place},"
        try:
            result = function(samples)
        except Exception as error:
            raise SampleError(f"{where} failed: {_described_error(error)}.") from error
        return CollatedBatch(result, where)

    def _own(self) -> tuple[list[Step], Any]:
        """Return this thread's copies."""
        found: tuple[list[Step], Any] | None = getattr(self._local, "own", None)
        if found is None:
            found = copy.deepcopy((self._originals, self._collate))
            self._local.own = found
        return found

    def _call(
        self,
        steps: Sequence[Step],
        sample: Mapping[str, Any],
        key: str,
        facts: list[dict[str, Any]],
        rng: np.random.Generator,
    ) -> dict[str, Any]:
        reserved = {"__key__": key, "__facts__": facts, "__rng__": rng}
        found = {**sample, **reserved}
        for step, name in zip(steps, self.names, strict=True):
            try:
                result = step(found)
            except Exception as error:
                raise SampleError(
                    f"The transform {name} failed on sample {key}: {_described_error(error)}."
                ) from error
            if result is None:
                raise SampleError(
                    f"The transform {name} returned None for sample {key}. It changed the sample in place? "
                    "Then return the sample."
                )
            if not isinstance(result, Mapping):
                raise SampleError(
                    f"The transform {name} returned {type(result).__name__} for sample {key}; return a dict "
                    "of the entries that the batch is to hold."
                )
            found = {**result, **reserved}
        return {name: value for name, value in found.items() if name not in RESERVED_ENTRIES}

    # ---- before step 0 ---------------------------------------------------------------------------

    def _check_copies(self) -> None:
        every = [*self._originals, *([] if self._collate is None else [self._collate])]
        for one in every:
            try:
                copy.deepcopy(one)
            except Exception as error:
                raise ConfigError(
                    f"The transform {_short_name(one)} cannot be copied ({type(error).__name__}), and each "
                    "loader thread needs a copy; create locks, files and connections when it is first called."
                ) from error

    def _probe(
        self, outputs: Mapping[str, Any] | None, example: Callable[[bool], dict[str, Any]], *, varies: bool
    ) -> OutputContract:
        """Call copies of the steps with synthetic samples, and see what they return and draw from."""
        declared = None if outputs is None else declared_contract(outputs)
        where = f"{self._source}, for a synthetic sample,"
        found: list[dict[str, Any]] = []
        while True:
            before = _generator_states()
            steps = copy.deepcopy(self._originals)
            try:
                found = [
                    self._call(steps, example(is_other), "synthetic", [], np.random.default_rng(number))
                    for number, is_other in enumerate((False, True) if varies else (False,))
                ]
                contract = declared or probed_contract(found, where)
            except SampleError as error:
                if declared is None or error.__cause__ is None:
                    raise ConfigError(
                        f"{error.message} It was called with a synthetic sample to learn what it returns; "
                        "correct it, or declare outputs= if it cannot take one."
                    ) from error
                contract = declared
            if self._collate is not None:
                self._probe_collate(contract)
            after = _generator_states()
            _restore_generators(before)
            if before.keys() == after.keys():
                break  # otherwise a step imported torch, whose generator was not seen
        drawn = tuple(name for name in before if after[name][0] != before[name][0])
        return OutputContract(contract.outputs, drawn)

    def _probe_collate(self, contract: OutputContract) -> None:
        name, blank = _short_name(self._collate), contract.blank()
        try:
            result = copy.deepcopy(self._collate)([blank, dict(blank)])
        except Exception as error:
            raise ConfigError(
                f"collate={name} failed on two synthetic samples, the entries of slots without a sample: "
                f"{_described_error(error)}. It must take those of padding slots as well."
            ) from error
        try:
            CollatedBatch(result, f"collate={name}")
        except SampleError as error:
            raise ConfigError(error.message) from error

    def _portability(self) -> str | None:
        """Return the name of what cannot be sent to another process; None if all can."""
        named = [*zip(self._originals, self.names, strict=True)]
        if self._collate is not None:
            named.append((self._collate, _short_name(self._collate)))
        for one, name in named:
            buffer = io.BytesIO()
            try:
                ForkingPickler(buffer).dump(one)
            except Exception:  # noqa: BLE001 - whatever its classes raise
                return f"The transform {name}"
            if b"__main__" in buffer.getvalue():
                return f"The transform {name}, which is part of the main program,"
        return None


def check_name(name: str) -> None:
    """Refuse a string that cannot name a function; an empty one means no function.

    Raises:
        ConfigError: It is not of the form ``package.module:function``, or names the main module, which no
            other process can import.
    """
    if name and (not _NAME.fullmatch(name) or name.startswith("__main__:")):
        raise ConfigError(
            f"transform must be package.module:function, of a module that can be imported, got {name!a}; "
            "put the function into a module of its own."
        )


def load_function(name: str, setting: str = "transform") -> Step:
    """Import a function or class by its name.

    Raises:
        ConfigError: There is no such module or function.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{setting} must name a function that can be imported, got {type(error).__name__} for {name!a}; "
            "is its folder on PYTHONPATH?"
        ) from error
    if not callable(found):
        raise ConfigError(f"{setting} must name a function, got {type(found).__name__} for {name!a}.")
    step: Step = found
    return step


def _resolve(given: Any, setting: str) -> Step:
    """Return a callable that was given, or named.

    Raises:
        ConfigError: It is none, or cannot be imported.
    """
    if isinstance(given, str):
        check_name(given)
        given = load_function(given)
    if not callable(given):
        raise ConfigError(
            f"{setting}= is a function of a sample, its name 'package.module:name', or a list of them, got "
            f"{type(given).__name__}."
        )
    step: Step = given
    return step


def _importable_name(given: Any) -> str:
    """Return the name that leads to a function in any process.

    Raises:
        ConfigError: There is none.
    """
    parts = (str(getattr(given, one, "")) for one in ("__module__", "__qualname__"))
    name = given if isinstance(given, str) else ":".join(parts)
    with suppress(ConfigError):
        check_name(name)
        if load_function(name) is given or isinstance(given, str):
            return name
    raise ConfigError(
        f"The transform {_short_name(given)} cannot be sent to data servers, which get no code; put it into "
        "a module that they have, write its name 'package.module:name', and start them with --allow "
        "package.module."
    )


def _short_name(step: Any) -> str:
    """Return a name for messages."""
    while isinstance(step, partial):
        step = step.func
    name = step.name if isinstance(step, LibraryTransform) else getattr(step, "__qualname__", None)
    name = name or type(step).__qualname__
    return str(name).removeprefix("<locals>.").rpartition("<locals>.")[2]


def _described_error(error: BaseException) -> str:
    """Name an error of the user's function and its line, without its text, which may quote a report."""
    if isinstance(error, ShardflowError):
        return error.message.rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


# ---- process-global generators -------------------------------------------------------------------


def _generator_states() -> dict[str, tuple[bytes, Any]]:
    """Return the states of the process-global generators that are imported: to compare, and to restore."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002 - the global one is what users may draw from
    found: dict[str, tuple[bytes, Any]] = {
        "random": (repr(random.getstate()).encode(), random.getstate()),
        "numpy.random": (repr(numpy_state[2:]).encode() + np.asarray(numpy_state[1]).tobytes(), numpy_state),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        state = torch.random.get_rng_state()
        found["torch"] = (state.numpy().tobytes(), state)
    return found


def _restore_generators(states: Mapping[str, tuple[bytes, Any]]) -> None:
    random.setstate(states["random"][1])
    np.random.set_state(states["numpy.random"][1])  # noqa: NPY002
    if "torch" in states:
        sys.modules["torch"].random.set_rng_state(states["torch"][1])


def _seed_generators(names: Sequence[str], seed: int) -> None:
    """Seed process-global generators for a sample, in a process that has one thread for samples."""
    if "random" in names:
        random.seed(seed)
    if "numpy.random" in names:
        np.random.seed(seed % 2**32)  # noqa: NPY002
    if "torch" in names:
        importlib.import_module("torch").manual_seed(seed % 2**63)


# ---- identity ------------------------------------------------------------------------------------


def identity_of(value: Any, depth: int = 0) -> Any:
    """Return name and parameters of a function or an object as JSON values, equal in every process.

    Of a function it is the name, with the values that it closes over; of an object whose class has a ``repr``
    of its own that, otherwise its class and attributes. Code is not part of it.
    """
    if depth > _MAX_DEPTH:
        return "..."
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    inner = partial(identity_of, depth=depth + 1)
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), sha256_hex(np.ascontiguousarray(value).tobytes())]
    if isinstance(value, list | tuple):
        return [inner(one) for one in value]
    if isinstance(value, Mapping):
        return [[inner(key), inner(one)] for key, one in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(str(inner(one)) for one in value)
    if isinstance(value, partial):
        return ["partial", inner(value.func), inner(value.args), inner(value.keywords)]
    if isinstance(value, MethodType):
        return ["method", value.__func__.__qualname__, inner(value.__self__)]
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        values = [*_closed_over(value), *(getattr(value, "__defaults__", None) or ())]
        return [f"{value.__module__}:{value.__qualname__}", *map(inner, values)]
    kind: Any = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    text = repr(value)
    if kind.__repr__ is not object.__repr__ and not _ADDRESS.search(text):
        return [name, text]
    attributes = getattr(value, "__dict__", {})
    return [name, [[key, inner(attributes[key])] for key in sorted(attributes)]]


def _closed_over(function: Any) -> list[Any]:
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return found
