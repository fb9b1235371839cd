"""Conversations into a loop: `sf.Conversation` against TRL and Energon, with the model's processor.

    python -m benchmarks.conversations.run --output benchmarks/results/conversations.json

All get the same conversations and give the same token ids, TRL also the same labels and pixels, which is
checked first. Cases:

- ``text``: conversations of mixed length, padded to the longest of a micro-batch of eight.
- ``packed``: the same, several in a sequence of 2,048 tokens; TRL packs "bfd", and Megatron-Energon what its
  user selects of a buffer: by best-fit decreasing too, with all conversations in the buffer, rendered by the
  tokenizer whenever a batch needs them. It has an environment of its own.
- ``images``: a question about a picture of 448 x 448, of Qwen2.5-VL's processor.

Each cell is a fresh process of one loader on one thread; the loaders take turns, three rounds. TRL renders
and tokenizes texts once, before the first batch, into files; ours renders them whenever a batch needs them.
So both parts are told apart: processor time a sample of preparing (once), and of each epoch. ``first_s`` is
from the start of the process to the first batch, without files of an earlier run, and ``resume_s``, in the
first round, that to a batch in the middle of an epoch, with them: TRL's Trainer skips there through
`accelerate.skip_first_batches`, and Energon takes a state that it saved there.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.about import about_run
from benchmarks.peers.environments import PEERS, environment

REPOSITORY = Path(__file__).resolve().parents[2]
CASES = ("text", "packed", "images")
LOADERS = dict.fromkeys(CASES, ("shardflow", "trl")) | {"packed": ("shardflow", "trl", "energon")}
NUMBERS = {"text": 3000, "packed": 3000, "images": 300}
SIZES = {"text": 8, "packed": 1, "images": 4}
"""Conversations of a micro-batch, or sequences of 2,048 tokens."""
MAX_TOKENS = 2048
SHORTEST_S = 10.0
WORDS = ("the", "heart", "is", "normal", "lungs", "are", "clear", "no", "effusion", "or", "stable", "seen")


def words(draws: random.Random, count: int) -> str:
    return " ".join(draws.choices(WORDS, k=count))


def prepare(folder: Path) -> None:
    """Write both loaders' input: a dataset of ours, a dataset of TRL, a model's folder."""
    import datasets
    from PIL import Image

    from shardflow.format.writer import ShardWriter
    from tests.conversation_case import make_folder

    for case, family in (("text", "llama"), ("images", "qwen2_5_vl")):
        make_folder(family, folder / case / "model")
        draws, rows = random.Random(7), []
        with ShardWriter(folder / case / "shardflow", splits={"train": 1}) as writer:
            for number in range(NUMBERS[case]):
                question = words(draws, draws.randint(4, 20))
                answer = words(draws, min(280, round(draws.lognormvariate(3.5, 1.0)) + 3))
                content: list[Any] = [{"type": "text", "text": question}]
                sample: dict[str, Any] = {"__key__": f"talk{number:06d}"}
                images: list[Any] = []
                if case == "images":
                    pixels = np.random.default_rng(number).integers(0, 256, (28, 28, 3), np.uint8)
                    picture, data = Image.fromarray(pixels).resize((448, 448)), io.BytesIO()
                    picture.save(data, "PNG")
                    content.insert(0, {"type": "image", "image": 0})
                    sample["image.000.png"], images = data.getvalue(), [{"member": "image.000.png"}]
                turns = [
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": [{"type": "text", "text": answer}]},
                ]
                document = {"format_version": 1, "kind": "conversation", "form": "messages"}
                writer.write(
                    {**sample, "conversation.json": {**document, "messages": turns, "images": images}}
                )
                if case == "text":
                    shown = zip(("user", "assistant"), (question, answer), strict=True)
                    rows.append({"messages": [{"role": role, "content": text} for role, text in shown]})
                else:
                    rows.append(
                        {
                            "prompt": [{"role": "user", "content": question}],
                            "completion": [{"role": "assistant", "content": answer}],
                            "images": [{"bytes": sample["image.000.png"], "path": None}],
                        }
                    )
        if case == "text":
            write_tar(folder / case / "energon", [json.dumps(row["messages"]) for row in rows])
        made = datasets.Dataset.from_list(rows)
        if case == "images":
            made = made.cast_column("images", datasets.List(datasets.Image()))
        made.save_to_disk(str(folder / case / "trl"))


def write_tar(folder: Path, texts: list[str]) -> None:
    """Write texts into a tar, as members of samples of their own."""
    folder.mkdir()
    with tarfile.open(folder / "shard-000000.tar", "w") as tar:
        for number, text in enumerate(texts):
            member = tarfile.TarInfo(f"talk{number:06d}.txt")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))


class Ours:
    """Batches of our loader."""

    def __init__(self, folder: Path, case: str) -> None:
        import shardflow as sf

        place = folder / ("images" if case == "images" else "text")
        settings: dict[str, Any] = {"images": {"max_images": 1}, "packed": {"packed": True}}.get(case, {})
        if case == "packed":
            from shardflow.training.tokenizing import count_dataset

            count_dataset(sf.open(place / "shardflow"), place / "model")
        talk = sf.Conversation(processor=str(place / "model"), max_tokens=MAX_TOKENS, **settings)
        size = SIZES[case]
        self.loader = sf.Loader(
            sf.open(place / "shardflow"),
            split="train",
            seed=1,
            batch=batch_spec(case, size),
            fields={"talk": talk},
            config=sf.LoaderConfig(num_threads=1, execution="threads"),
        )

    def batches(self) -> Iterator[tuple[int, int, int, Any]]:
        """Iterate over an epoch: conversations, their tokens, the places for them, and the batch."""
        for batch in self.loader:
            tensors = batch.torch()
            mask = tensors["talk_mask"]
            room = MAX_TOKENS if "talk_cu_seqlens" in tensors else mask.numel()
            yield int((tensors["weight"] > 0).sum()), int(mask.sum()), room, tensors

    def skip_to_middle(self) -> None:
        """Go to the middle of the epoch."""
        position = self.loader.num_steps // 2
        self.loader.load_state_dict({**self.loader.state_dict(), "step": position})


def batch_spec(case: str, size: int) -> Any:
    """How our steps are formed; ``packed`` fills sequences of `MAX_TOKENS`."""
    import shardflow as sf

    if case == "packed":
        budget = sf.TokenBudget(max_tokens=MAX_TOKENS, max_samples=256, padded=False)
        return sf.BatchSpec(budget=budget, micro_batches_per_step=1, lanes=1)
    return sf.BatchSpec(micro_batch_size=size, micro_batches_per_step=1)


class Trl:
    """Batches of TRL's trainer."""

    def __init__(self, folder: Path, case: str) -> None:
        import datasets
        import transformers
        import trl

        transformers.utils.logging.set_verbosity_error()
        datasets.disable_progress_bars()
        place = folder / ("images" if case == "images" else "text")
        kind = transformers.AutoTokenizer if case != "images" else None
        if kind is None:
            from shardflow.fields.conversations.rendering import Renderer

            processor: Any = Renderer.load(str(place / "model")).processor
        else:
            processor = kind.from_pretrained(str(place / "model"))
        settings = trl.SFTConfig(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=SIZES[case],
            max_length=MAX_TOKENS if case != "images" else None,
            packing=case == "packed",
            packing_strategy="bfd",
            assistant_only_loss=case != "images",
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
        )
        self.trainer = trl.SFTTrainer(
            str(place / "model"),
            settings,
            train_dataset=datasets.load_from_disk(str(place / "trl")),
            processing_class=processor,
        )
        self.loader = self.trainer.get_train_dataloader()

    def batches(self) -> Iterator[tuple[int, int, int, Any]]:
        """Iterate over an epoch, as `Ours.batches`."""
        for batch in self.loader:
            ids = batch["input_ids"]
            mask = batch.get("attention_mask")
            if mask is None:  # padding-free: one row of whole conversations
                starts = int((batch["position_ids"] == 0).sum())
                yield starts, ids.numel(), max(ids.numel(), MAX_TOKENS * SIZES["packed"]), batch
            else:
                yield len(ids), int(mask.sum()), mask.numel(), batch

    def skip_to_middle(self) -> None:
        """Go to the middle of the epoch."""
        from accelerate import skip_first_batches

        self.loader = skip_first_batches(self.loader, len(self.loader) // 2)


class Energon:
    """Sequences of Megatron-Energon, which packs what the task encoder selects."""

    def __init__(self, folder: Path, case: str) -> None:
        import torch
        from megatron.energon import (
            DefaultTaskEncoder,
            Sample,
            WorkerConfig,
            edataclass,
            get_savable_loader,
            get_train_dataset,
            stateless,
        )
        from transformers import AutoTokenizer

        assert case == "packed"
        place = folder / "text"
        self._state = place / "energon.pt"
        tokenizer: Any = AutoTokenizer.from_pretrained(str(place / "model"))

        @edataclass
        class Talk(Sample):
            ids: torch.Tensor
            labels: torch.Tensor

        @edataclass
        class Packed(Sample):
            ids: torch.Tensor
            labels: torch.Tensor
            position_ids: torch.Tensor

        class Encoder(DefaultTaskEncoder):
            @stateless
            def encode_sample(self, sample: Any) -> Talk:
                settings = {"return_dict": True, "return_assistant_tokens_mask": True}
                found = tokenizer.apply_chat_template(json.loads(sample.text), tokenize=True, **settings)
                ids, mask = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"])
                return Talk.derive_from(sample, ids=ids, labels=torch.where(mask > 0, ids, -100))

            def select_samples_to_pack(self, samples: list[Talk]) -> list[list[Talk]]:
                groups: list[list[Talk]] = []
                rooms: list[tuple[int, int]] = []  # ascending, each with the number of its group
                for sample in sorted(samples, key=lambda one: -len(one.ids)):
                    at = bisect.bisect_left(rooms, (len(sample.ids), 0))
                    room, number = rooms.pop(at) if at < len(rooms) else (MAX_TOKENS, len(groups))
                    if number == len(groups):
                        groups.append([])
                    groups[number].append(sample)
                    bisect.insort(rooms, (room - len(sample.ids), number))
                return groups

            @stateless
            def pack_selected_samples(self, samples: list[Talk]) -> Packed:
                places = [torch.arange(len(one.ids)) for one in samples]
                return Packed.derive_from(
                    samples[0],
                    ids=torch.cat([one.ids for one in samples]),
                    labels=torch.cat([one.labels for one in samples]),
                    position_ids=torch.cat(places),
                )

        self.loader = get_savable_loader(
            get_train_dataset(
                place / "energon",
                worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
                batch_size=1,
                shuffle_buffer_size=None,
                max_samples_per_sequence=None,
                packing_buffer_size=NUMBERS["packed"],
                task_encoder=Encoder(),
                repeat=False,
            )
        )

    def batches(self) -> Iterator[tuple[int, int, int, Any]]:
        """Iterate over an epoch, as `Ours.batches`."""
        for batch in self.loader:
            found = {"input_ids": batch.ids, "labels": batch.labels, "position_ids": batch.position_ids}
            yield int((batch.position_ids == 0).sum()), batch.ids.numel(), MAX_TOKENS, found

    def keep_middle(self) -> None:
        """Write the state in the middle of an epoch, for `skip_to_middle` of another process."""
        import torch

        num = sum(1 for _ in self.batches())
        for number, _ in enumerate(self.batches(), start=1):
            if number == num // 2:
                torch.save(self.loader.save_state_global(0), self._state)
                break

    def skip_to_middle(self) -> None:
        """Go to the middle of the epoch."""
        import torch

        self.loader.restore_state_global(torch.load(self._state, weights_only=False))


KINDS: dict[str, Any] = {"shardflow": Ours, "trl": Trl, "energon": Energon}


def measure(folder: Path, loader: str, case: str, *, resumes: bool) -> dict[str, Any]:
    """Measure one cell in this process, which the parent has just started."""
    import torch

    torch.set_num_threads(1)
    started = float(os.environ["BENCHMARK_STARTED"])
    imported_cpu_s = time.process_time()
    source: Any = KINDS[loader](folder, case)
    if resumes:
        source.skip_to_middle()
        next(iter(source.batches()))
        return {"resume_s": time.time() - started}
    batches = source.batches()
    prepared_cpu_s = time.process_time() - imported_cpu_s
    next(batches)
    first_s = time.time() - started
    samples = tokens = places = 0
    began, began_cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < SHORTEST_S:
        for num, used, room, _ in batches:
            samples, tokens, places = samples + num, tokens + used, places + room
            if time.perf_counter() - began >= SHORTEST_S:
                break
        else:
            batches = source.batches()
    cpu_s = time.process_time() - began_cpu_s
    wall_s = time.perf_counter() - began
    if loader == "energon":
        Energon(folder, case).keep_middle()
    return {
        "samples": samples,
        "wall_s": wall_s,
        "samples_per_s": samples / wall_s,
        "samples_per_cpu_s": samples / cpu_s,
        "cpu_ms_per_sample": 1e3 * cpu_s / samples,
        "prepare_cpu_ms_per_sample": 1e3 * prepared_cpu_s / NUMBERS[case],
        "fill": tokens / places,
        "first_s": first_s,
        "peak_mb": peak_mb(),
    }


def peak_mb() -> float:
    """Return the largest resident size of this process, which `getrusage` takes over from its parent."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) / 1024


def check_equal(folder: Path, case: str) -> dict[str, Any]:
    """Compare what both give, conversation by conversation; return what was compared.

    Raises:
        AssertionError: Ids, or pixels, differ.
    """
    found: list[dict[bytes, Any]] = []
    for kind in (Ours, Trl):
        seen: dict[bytes, Any] = {}
        for *_, batch in kind(folder, case).batches():
            seen.update(_by_ids(batch, case))
            if len(seen) >= 64 and kind is Ours:
                break
        found.append(seen)
    ours, theirs = found
    labels = 0
    for ids, (learned, pixels) in ours.items():
        assert ids in theirs, "a conversation of ours is none of TRL's"
        labels += int((learned != theirs[ids][0]).sum())
        assert np.array_equal(pixels, theirs[ids][1])
    return {"conversations": len(ours), "ids_and_pixels": "equal", "differing_labels": labels}


def digest_of_packed(folder: Path, loader: str) -> dict[str, Any]:
    """Return how many conversations an epoch of packed sequences has, and a digest of their token ids."""
    found = []
    for *_, batch in KINDS[loader](folder, "packed").batches():
        is_ours = "talk" in batch
        ids = np.asarray(batch["talk" if is_ours else "input_ids"])[0]
        places = np.asarray(batch["talk_position_ids" if is_ours else "position_ids"])[0]
        found += [one.astype("<i8").tobytes() for one in np.split(ids, np.flatnonzero(places == 0)[1:])]
    digest = hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in sorted(found)))
    return {"conversations": len(found), "ids": digest.hexdigest()}


def _by_ids(batch: Any, case: str) -> Iterator[tuple[bytes, tuple[Any, Any]]]:
    is_ours = "talk" in batch
    ids = np.asarray(batch["talk" if is_ours else "input_ids"])
    mask = np.asarray(batch["talk_mask" if is_ours else "attention_mask"]) > 0
    learned = np.asarray(batch["talk_weights"]) > 0 if is_ours else np.asarray(batch["labels"]) != -100
    pixels = None
    if case == "images":
        pixels = np.asarray(batch["talk_pixel_values" if is_ours else "pixel_values"])
        pixels = pixels.reshape(len(ids), -1, pixels.shape[-1])
    for row in range(len(ids)):
        used = mask[row]
        key = ids[row][used].astype(np.int64).tobytes()
        yield key, (learned[row][used], None if pixels is None else pixels[row])


def start(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a part of this program in a fresh process, and return what it printed; Energon's in its own."""
    python = energon_python(folder) if "energon" in arguments else Path(sys.executable)
    environment = {
        **os.environ,
        "BENCHMARK_STARTED": str(time.time()),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    command = [str(python), "-m", "benchmarks.conversations.run", "--folder", str(folder), *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def energon_python(folder: Path) -> Path:
    """Return the interpreter of Energon's environment, made beside the data when it is first asked for."""
    from importlib.metadata import version

    extras = [f"{name}=={version(name)}" for name in ("transformers", "tokenizers", "jinja2")]
    return environment("energon", folder.parent / "environments", *extras)


def prepare_energon(folder: Path) -> None:
    """Index the tar with Energon's own command."""
    tool = energon_python(folder).with_name("energon")
    command = [tool, "prepare", folder / "text" / "energon", "--non-interactive", "--num-workers", "1"]
    for split in ("train:shard-.*", "val:shard-.*"):
        command += ["--split-parts", split]
    command += ["--sample-type", "TextSample", "--field-map", '{"text": "txt"}']
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)


def forget(folder: Path) -> None:
    """Remove what has been prepared, but for the input."""
    from shardflow.format.counts import CountsManifest

    shutil.rmtree(folder / "cache", ignore_errors=True)
    for file in folder.glob("*/trl/cache-*"):
        file.unlink()
    shutil.rmtree(folder / "text" / "shardflow" / CountsManifest.root, ignore_errors=True)


def run_all(folder: Path, cases: list[str], rounds: int) -> dict[str, Any]:
    """Measure all cells, the loaders in turns."""
    raw: dict[str, list[dict[str, Any]]] = {f"{case} {one}": [] for case in cases for one in LOADERS[case]}
    equal = {case: start(folder, "--check", case) for case in cases if case != "packed"}
    if "packed" in cases:
        prepare_energon(folder)
        digests = [start(folder, "--digest", one) for one in LOADERS["packed"]]
        assert all(one == digests[0] for one in digests), digests
        equal["packed"] = digests[0]
    for number in range(rounds):
        for case in cases:
            for loader in LOADERS[case] if number % 2 == 0 else LOADERS[case][::-1]:
                forget(folder)
                cell = start(folder, "--cell", loader, case)
                if number == 0:
                    cell |= start(folder, "--cell", loader, case, "--resumes")
                raw[f"{case} {loader}"].append(cell)
                print(case, loader, json.dumps(cell), file=sys.stderr)
    medians = {
        name: {key: statistics.median(one[key] for one in cells if key in one) for key in cells[0]}
        for name, cells in raw.items()
    }
    return {"equal": equal, "medians": medians, "rounds": raw}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--cell", nargs=2, metavar=("LOADER", "CASE"))
    parser.add_argument("--resumes", action="store_true")
    parser.add_argument("--check", choices=CASES)
    parser.add_argument("--digest", choices=LOADERS["packed"])
    arguments = parser.parse_args()
    if arguments.cell:
        loader, case = arguments.cell
        print(json.dumps(measure(arguments.folder, loader, case, resumes=arguments.resumes)))
        return
    if arguments.digest:
        print(json.dumps(digest_of_packed(arguments.folder, arguments.digest)))
        return
    if arguments.check:
        print(json.dumps(check_equal(arguments.folder, arguments.check)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        prepare(folder)
        load = os.getloadavg()[0]
        found = run_all(folder, arguments.cases, arguments.rounds)
    packages = ["numpy", "torch", "transformers", "tokenizers", "trl", "datasets", "accelerate"]
    record = {
        "command": "python -m benchmarks.conversations.run",
        **about_run(packages),
        "energon": PEERS["energon"].requirement,
        "load_average_at_start": load,
        "settings": {"num_conversations": NUMBERS, "micro_batch_size": SIZES, "max_tokens": MAX_TOKENS},
        **found,
    }
    text = json.dumps(record, indent=1) + "\n"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
