from __future__ import annotations

import contextlib
import ctypes
import io
import struct
import subprocess
import sys
import threading
import weakref
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import blosc2
import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image

from shardflow.errors import FormatError
from shardflow.format.codecs import (
    CODECS,
    FAST,
    ROOM_BEFORE,
    array_header,
    codec_for,
    decode_array,
    decode_arrays,
    encode_array,
    room_behind,
)
from shardflow.format.slice_codecs import b2nd, blosc2_library

pytestmark = pytest.mark.fast

ENCODINGS = [*sorted(CODECS), FAST]
DTYPES = ["|u1", "|i1", "<i2", "<u2", "<i4", "<f4", "<f8"]
SHAPES = [
    (1, 1),
    (2, 2),
    (1, 300),
    (300, 1),
    (7, 5),
    (64, 48),
    (61, 3),
    (40, 30, 3),
    (5, 4, 1),
    (512, 512),
    (509, 700),
]


def _pixels(shape: tuple[int, ...], dtype: str, kind: str) -> NDArray[Any]:
    rng = np.random.default_rng([len(shape), *shape])
    if kind == "zeros":
        return np.zeros(shape, dtype)
    if kind == "one value":
        return np.full(shape, 7, dtype)
    if kind == "smooth":
        return (
            np.add.outer(np.arange(shape[0]), np.arange(int(np.prod(shape[1:])))).reshape(shape).astype(dtype)
        )
    return (
        rng.integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
        .view(dtype)
        .reshape(shape)
    )


@pytest.mark.parametrize("codec", ENCODINGS)
@pytest.mark.parametrize("kind", ["noise", "smooth", "one value", "zeros"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_come_back_bit_for_bit(codec: str, kind: str, dtype: str) -> None:
    for shape in SHAPES:
        pixels = _pixels(shape, dtype, kind)
        if codec != FAST and not CODECS[codec].holds(shape, np.dtype(dtype)):
            assert codec_for(codec, shape, np.dtype(dtype)) == "b2nd"
            with pytest.raises(FormatError, match=f"one that {codec} can hold"):
                encode_array(codec, pixels)
            continue
        assert codec_for(codec, shape, np.dtype(dtype)) == codec
        payload = encode_array(codec, pixels)
        assert array_header(codec, payload) == (shape, np.dtype(dtype))
        assert decode_array(codec, payload).tobytes() == pixels.tobytes()
        out = np.full(shape, 1, dtype)
        for view in (payload, bytearray(payload), memoryview(payload), np.frombuffer(payload, np.uint8)):
            out[...] = 1
            assert decode_array(codec, view, out) is out
            assert out.tobytes() == pixels.tobytes()


@settings(max_examples=60)
@given(
    st.sampled_from(ENCODINGS),
    hnp.arrays(
        st.sampled_from([">i2", ">u4", "<i2", "<u2", "|u1", "|i1", ">f4", "<f8"]),
        hnp.array_shapes(min_dims=2, max_dims=3, max_side=20),
    ),
)
def test_any_array_comes_back_little_endian(codec: str, pixels: NDArray[Any]) -> None:
    codec = codec_for(codec, pixels.transpose().shape, pixels.dtype)
    found = decode_array(codec, encode_array(codec, pixels.transpose()))
    assert found.dtype == pixels.dtype.newbyteorder("<")
    assert found.tobytes() == np.ascontiguousarray(pixels.transpose(), found.dtype).tobytes()


@pytest.mark.parametrize("codec", ENCODINGS)
def test_the_same_slice_gives_the_same_bytes(codec: str) -> None:
    pixels = _pixels((512, 700), "<i2", "noise")
    payloads: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: payloads.append(encode_array(codec, pixels.copy()))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(payloads) == 6
    assert len(set(payloads)) == 1


def test_what_a_thread_encoded_before_does_not_show() -> None:
    """The scratch memory of the library outlives an array."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, most, shape).astype(dtype)
        for most in (1, 2, 200, 4096)
        for shape in ((512, 512), (100, 70), (512, 512, 3))
        for dtype in ("<u2", "<i4", "<f4")
    ]

    def encode_alone(codec: str, array: NDArray[Any]) -> bytes:
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.append(encode_array(codec, array)))
        thread.start()
        thread.join()
        return found[0]

    for codec in ("b2nd", FAST):
        alone = [encode_alone(codec, array) for array in arrays]
        for number in rng.permutation(2 * len(arrays)) % len(arrays):
            assert encode_array(codec, arrays[number]) == alone[number]
        assert [encode_array(codec, array) for array in arrays] == alone


def test_encoding_takes_one_thread() -> None:
    """More give other bytes from run to run."""
    before = len(list(Path("/proc/self/task").iterdir()))
    encode_array("b2nd", _pixels((512, 700), "<i2", "noise"))
    encode_array("b2nd", _pixels((512, 700), "|u1", "noise"))
    assert len(list(Path("/proc/self/task").iterdir())) == before


def test_encoding_by_the_package_takes_one_thread_and_makes_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pixels = [_pixels((512, 700), dtype, kind) for dtype in ("<i2", "|u1") for kind in ("noise", "zeros")]
    frames = [encode_array(codec, one) for one in pixels for codec in ("b2nd", FAST)]
    threads: list[int] = []
    asarray, compress = blosc2.asarray, blosc2.compress2

    def record_asarray(array: Any, **keywords: Any) -> Any:
        threads.append(keywords["cparams"].nthreads)
        return asarray(array, **keywords)

    def record_compress(array: Any, **keywords: Any) -> Any:
        threads.append(keywords["nthreads"])
        return compress(array, **keywords)

    monkeypatch.setattr(blosc2, "asarray", record_asarray)
    monkeypatch.setattr(blosc2, "compress2", record_compress)
    # As where the library has another structure of settings, which it would misread.
    monkeypatch.setattr(blosc2_library, "_DEFAULTS", blosc2_library.EncodingParameters(level=4))
    blosc2_library._encoding_library.cache_clear()
    b2nd._empty_header.cache_clear()
    b2nd._around.cache_clear()
    try:
        assert [encode_array(codec, one) for one in pixels for codec in ("b2nd", FAST)] == frames
    finally:
        blosc2_library._encoding_library.cache_clear()
    assert len(threads) >= len(frames)
    assert set(threads) == {1}


def test_encoding_and_decoding_load_no_more_than_the_library() -> None:
    """The package costs each packing process more than NumPy and all of the format."""
    code = """
import sys
import numpy as np
from shardflow.format import decode_array, encode_array
for dtype in ("<i2", "|u1"):
    pixels = np.arange(64).reshape(8, 8).astype(dtype)
    assert (decode_array("b2nd", encode_array("b2nd", pixels)) == pixels).all()
    encode_array("b2nd", np.zeros((8, 8), dtype))
print(*sorted({"blosc2", "cv2", "asyncio", "ssl"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("num_bytes", [(1 << 31) - 32, (1 << 32) + 64])
def test_an_array_beyond_32_bits_is_refused(num_bytes: int) -> None:
    """Cut to 32 bits the second size would be 64: a frame would hold that much, and nothing would say so."""
    pixels = np.empty((num_bytes // 32, 16), "<i2")  # no page of it is touched
    with pytest.raises(ValueError, match="at most 2147483615 bytes"):
        blosc2_library.compress(pixels, is_fast=False)
    with pytest.raises(ValueError, match="at most 2147483615 bytes"):
        blosc2_library.make_frame(pixels, pixels.shape, pixels.dtype, *[pixels.shape] * 2, is_fast=False)


def _frame_by_blosc2_alone(codec: str, pixels: NDArray[Any], block_rows: int) -> bytes:
    by_zstd = (blosc2.Codec.ZSTD, 1, [blosc2.Filter.SHUFFLE, blosc2.Filter.BYTEDELTA])
    name, level, filters = (blosc2.Codec.LZ4, 9, [blosc2.Filter.BITSHUFFLE]) if codec == FAST else by_zstd
    frame = blosc2.asarray(
        pixels,
        chunks=pixels.shape,
        blocks=(block_rows, *pixels.shape[1:]),
        contiguous=True,
        dparams=blosc2.DParams(nthreads=1),
        cparams=blosc2.CParams(
            codec=name,
            clevel=level,
            filters=filters,
            filters_meta=[0] * len(filters),
            typesize=pixels.itemsize,
            nthreads=1,
        ),
    )
    return bytes(frame.to_cframe())


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("dtype", ["|u1", "<i2"])
def test_frames_do_not_depend_on_the_threads_of_the_writer(dtype: str, is_fast: bool) -> None:
    pixels = np.arange(4096).reshape(64, 64).astype(dtype)
    found = set()
    former = blosc2.set_nthreads(1)
    try:
        for num_threads in (1, 4):
            blosc2.set_nthreads(num_threads)
            b2nd._around.cache_clear()
            b2nd._empty_header.cache_clear()
            found.add(b2nd.encode(pixels, is_fast=is_fast))
    finally:
        blosc2.set_nthreads(former)
        b2nd._around.cache_clear()
        b2nd._empty_header.cache_clear()
    assert len(found) == 1


@pytest.mark.parametrize("codec", ["b2nd", FAST])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["noise", "smooth", "one value", "zeros"])
def test_frames_are_those_of_blosc2_byte_for_byte(kind: str, dtype: str, codec: str) -> None:
    """They are put together from its pieces, which must not show."""
    for shape in SHAPES:
        pixels = _pixels(shape, dtype, kind)
        payload = encode_array(codec, pixels)
        block_rows = blosc2.ndarray_from_cframe(payload).blocks[0]
        assert payload == _frame_by_blosc2_alone(codec, pixels, block_rows), shape


@settings(max_examples=60)
@given(
    hnp.arrays(
        st.sampled_from(["<i2", "<u2", "<i4", "<f4"]), hnp.array_shapes(min_dims=2, max_dims=3, max_side=90)
    )
)
def test_any_frame_is_that_of_blosc2(pixels: NDArray[Any]) -> None:
    payload = encode_array("b2nd", pixels)
    assert payload == _frame_by_blosc2_alone("b2nd", pixels, blosc2.ndarray_from_cframe(payload).blocks[0])


def test_plain_readers_read_the_payloads() -> None:
    """Without shardflow: python-blosc2 and NumPy."""
    for shape in SHAPES:
        for kind in ("noise", "smooth", "one value", "zeros"):
            pixels = _pixels(shape, "<i2", kind)
            frame = blosc2.ndarray_from_cframe(encode_array("b2nd", pixels))
            assert frame[...].tobytes() == pixels.tobytes()
            assert frame.dtype == pixels.dtype
            assert np.load(io.BytesIO(encode_array("npy", pixels))).tobytes() == pixels.tobytes()


def test_plain_readers_read_what_is_for_archives_and_other_tools() -> None:
    for dtype in ("|u1", "<u2", "<i2"):
        for shape in ((7, 5), (64, 48), (40, 30, 3)):
            pixels = _pixels(shape, dtype, "noise")
            found = imagecodecs.htj2k_decode(encode_array("htj2k", pixels))
            assert found.dtype == pixels.dtype
            assert found.tobytes() == pixels.tobytes()
            payload = encode_array("png16", pixels)
            moved = np.asarray(imagecodecs.png_decode(payload)).astype(np.int64)
            # The offset is where every PNG library finds texts.
            texts = getattr(Image.open(io.BytesIO(payload)), "text", {}) if dtype == "<i2" else {}
            assert texts == ({"Offset": "-32768"} if dtype == "<i2" else {})
            assert (moved + int(texts.get("Offset", "0")) == pixels).all()


def test_a_signed_slice_stays_signed_on_its_way_to_jpeg_2000() -> None:
    """As unsigned numbers around zero become two far ends, and the codestream a third larger."""
    rng = np.random.default_rng(0)
    pixels = rng.normal(0, 30, (128, 128)).astype("<i2")
    payload = encode_array("htj2k", pixels)
    assert array_header("htj2k", payload)[1] == np.dtype("<i2")
    assert len(payload) < 0.8 * len(encode_array("htj2k", pixels.view("<u2")))


def test_a_damaged_png_is_an_error_and_nothing_is_written_beside_the_output() -> None:
    payload = encode_array("png16", _pixels((16, 16), "<i2", "smooth"))
    room = np.full((3, 16, 16), 9, "<i2")
    num_refused = 0
    for place in range(0, 8 * len(payload), 3):
        damaged = bytearray(payload)
        damaged[place // 8] ^= 1 << place % 8
        try:
            decode_array("png16", damaged, room[1])
        except FormatError:
            num_refused += 1
    assert num_refused > len(payload)
    assert (room[::2] == 9).all()


_OTHER_CODESTREAMS = {
    "start": (0, b"\xff\x4e"),
    "another width": (8, b"\0\0\0\1"),
    "no tiles": (24, b"\0\0\0\0"),
    "four components": (38, b"\0\4"),
    "twelve bits": (40, b"\x0b"),
    "every second pixel": (41, b"\2"),
    "a segment beyond the end": (47, b"\xff\xff"),
    "no coding style": (56, b"\x50"),
    "precincts": (59, b"\1"),
    "two layers": (61, b"\0\2"),
    "blocks of JPEG 2000": (67, b"\0"),
    "mixed blocks": (67, b"\xc0"),
    "loses bits": (68, b"\0"),
    "two coding styles": (70, b"\x52"),
    "a coding style of a component": (91, b"\x53"),
    "a part that ends elsewhere": (124, b"\0"),
    "two parts": (126, b"\2"),
    "a segment of the part": (128, b"\x52"),
}


@pytest.mark.parametrize(("offset", "value"), _OTHER_CODESTREAMS.values(), ids=_OTHER_CODESTREAMS)
def test_a_codestream_of_another_kind_is_refused_before_it_is_decoded(offset: int, value: bytes) -> None:
    """Decoders divide by what stands there, or decode what no reader of this format needs to."""
    payload = bytearray(encode_array("htj2k", _pixels((16, 16), "<i2", "smooth")))
    payload[offset : offset + len(value)] = value
    with pytest.raises(FormatError, match="one tile in one part"):
        array_header("htj2k", payload)


def test_damage_that_the_decoder_finds_is_an_error() -> None:
    """imagecodecs drops this one where OpenJPH decodes."""
    payload = bytearray(encode_array("htj2k", _pixels((64, 64), "<i2", "smooth")))
    start = payload.index(b"\xff\x93") + 22
    payload[start:-2] = bytes(len(payload) - 2 - start)
    with pytest.raises(FormatError, match="must decode"):
        decode_array("htj2k", payload)


def test_the_documented_filters_are_used() -> None:
    frame = blosc2.ndarray_from_cframe(encode_array("b2nd", _pixels((512, 512), "<i2", "smooth")))
    assert frame.cparams.codec == blosc2.Codec.ZSTD
    assert frame.cparams.clevel == 1
    filters = [item for item in frame.cparams.filters if item != blosc2.Filter.NOFILTER]
    assert filters == [blosc2.Filter.SHUFFLE, blosc2.Filter.BYTEDELTA]
    assert (frame.chunks, frame.blocks) == ((512, 512), (256, 512))


@pytest.mark.parametrize(
    ("shape", "block_rows"),
    [
        ((512, 512), 256),  # 256 KiB
        ((64, 64), 64),  # small: one block
        ((509, 700), 509),  # prime: its divisor 1 is too small a block
        ((3000, 2400), 50),  # 234 KiB, the largest divisor that fits
        ((1, 200_000), 1),  # one row over the limit stays whole
    ],
)
def test_blocks_are_full_rows_that_divide_the_slice(shape: tuple[int, int], block_rows: int) -> None:
    frame = blosc2.ndarray_from_cframe(encode_array("b2nd", np.zeros(shape, "<i2")))
    assert frame.blocks == (block_rows, shape[1])


@pytest.mark.parametrize(
    ("chunks", "blocks"),
    [
        ((64, 48), (16, 48)),
        ((64, 48), (16, 16)),
        ((32, 48), (16, 48)),
        ((64, 48), (10, 48)),
        ((20, 20), (7, 9)),
    ],
)
def test_frames_of_other_writers_decode(chunks: tuple[int, int], blocks: tuple[int, int]) -> None:
    """Several chunks, blocks that cut rows or stand over the edge: slower, never wrong."""
    pixels = _pixels((64, 48), "<i2", "noise")
    payload = blosc2.asarray(pixels, chunks=chunks, blocks=blocks).to_cframe()
    assert array_header("b2nd", payload) == ((64, 48), np.dtype("<i2"))
    assert decode_array("b2nd", payload).tobytes() == pixels.tobytes()


def test_a_chunk_that_is_larger_than_the_output_never_overruns_it() -> None:
    """blosc2.decompress2 writes what the chunk says, however small the buffer; the chunk must be asked
    first.
    """
    payload = encode_array("b2nd", _pixels((128, 48), "<i2", "noise"))
    start = int.from_bytes(payload[11:15], "big")
    header = payload[:start]
    for width in (8, 4):  # the shape has 64-bit numbers, those of chunk and block have 32
        header = header.replace((128).to_bytes(width, "big"), (64).to_bytes(width, "big"))
    lying = header + payload[start:]
    assert array_header("b2nd", lying) == ((64, 48), np.dtype("<i2"))
    room = np.full((128, 48), 9, "<i2")
    with pytest.raises(FormatError, match="must hold 6144 bytes, got 12288"):
        decode_array("b2nd", lying, room[:64])
    assert (room == 9).all()


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_cut_payloads_are_refused(codec: str) -> None:
    payload = encode_array(codec, _pixels((16, 16), "<i2", "noise"))
    for stop in range(0, len(payload) - 1, 7):
        with pytest.raises(FormatError):
            decode_array(codec, payload[:stop], np.empty((16, 16), "<i2"))


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize(
    "out",
    [
        np.empty((5, 7), "<i2"),
        np.empty((7, 5), "<u2"),
        np.empty((7, 5), ">i2"),
        np.empty((7, 5, 1), "<i2"),
        np.empty((7, 10), "<i2")[:, ::2],
        np.empty((7, 5), "<i2", order="F"),
    ],
)
def test_an_output_that_does_not_fit_is_refused(codec: str, out: NDArray[Any]) -> None:
    payload = encode_array(codec, np.zeros((7, 5), "<i2"))
    with pytest.raises(FormatError):
        decode_array(codec, payload, out)


def test_a_read_only_output_is_refused() -> None:
    out = np.zeros((7, 5), "<i2")
    out.flags.writeable = False
    with pytest.raises(FormatError, match="writable"):
        decode_array("npy", encode_array("npy", out), out)


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros(4, "<i2"),
        np.zeros((0, 4), "<i2"),
        np.zeros((2, 2, 2, 2), "<i2"),
        np.zeros((2, 2), bool),
        np.zeros((2, 2), "O"),
        np.zeros((2, 2), "c8"),
    ],
)
def test_what_is_no_slice_is_refused(pixels: NDArray[Any]) -> None:
    for codec in CODECS:
        with pytest.raises(FormatError, match="a slice must be"):
            encode_array(codec, pixels)


def test_an_unknown_codec_is_named_beside_the_known() -> None:
    for call in (
        lambda: encode_array("png", np.zeros((2, 2))),
        lambda: decode_array("png", b""),
        lambda: array_header("png", b""),
    ):
        with pytest.raises(FormatError, match="one of b2nd, htj2k, npy, png16, got 'png'"):
            call()


def test_an_object_array_is_never_unpickled() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([[print]], object), allow_pickle=True)
    with pytest.raises(FormatError, match="plain numbers"):
        decode_array("npy", stream.getvalue())


def test_decoding_releases_the_gil_and_takes_one_thread() -> None:
    payload = encode_array("b2nd", _pixels((512, 700), "<i2", "noise"))
    before = len(list(Path("/proc/self/task").iterdir()))
    decode_array("b2nd", payload)
    assert len(list(Path("/proc/self/task").iterdir())) == before
    assert type(blosc2_library.library()) is ctypes.CDLL  # ctypes.PyDLL would hold it


def test_a_slice_is_decoded_into_memory_that_may_be_written_alone() -> None:
    """The C library gets an address and a size, and would write past the end of a view."""
    payload = memoryview(encode_array("b2nd", _pixels((64, 48), "<i2", "noise")))
    read_only = np.zeros((64, 48), "<i2")
    read_only.flags.writeable = False
    for out in (read_only, np.zeros((64, 96), "<i2")[:, ::2], np.zeros((64, 48), "<i2")[::-1]):
        with pytest.raises(ValueError, match="C-contiguous and writable"):
            b2nd.decode(payload, out)
        assert not out.any()


@pytest.mark.parametrize("at", [4, 8, 12], ids=["size", "size of blocks", "compressed size"])
def test_a_chunk_that_states_another_size_writes_into_its_array_alone(at: int) -> None:
    pixels = _pixels((64, 48), "<i2", "smooth")
    payload = memoryview(encode_array("b2nd", pixels))
    chunk = b2nd._chunk(b2nd._parse(payload), payload, pixels.nbytes)
    size = pixels.nbytes
    for value in (0, 1, 16, 31, 32, size - 1, size + 1, 2 * size, 64 * size, 2**31 - 1, -1, -(2**31)):
        room = np.full(3 * size, 0xAA, np.uint8)
        told = bytearray(chunk)
        struct.pack_into("<i", told, at, value)
        with contextlib.suppress(FormatError):
            b2nd._decompress(memoryview(told), room[size : 2 * size].view("<i2").reshape(pixels.shape))
        assert (room[:size] == 0xAA).all()
        assert (room[2 * size :] == 0xAA).all()
    assert decode_array("b2nd", bytes(payload)).tobytes() == pixels.tobytes()


def test_a_chunk_that_leaves_its_values_open_is_refused() -> None:
    """Decoding one changes nothing: a batch would keep the pixels of the one before."""
    pixels = _pixels((64, 48), "<i2", "noise")
    told = bytearray(encode_array("b2nd", pixels))
    start = int.from_bytes(told[11:15], "big")
    told[start + 31] |= 0x40
    with pytest.raises(FormatError, match="must have values"):
        decode_array("b2nd", bytes(told))
    size, block_size, stored = struct.unpack_from("<iii", told, start + 4)
    sizes = {"num_bytes": size, "block_num_bytes": block_size}
    for value, is_refused in ((told[start + 31], True), (0, False)):
        told[start + 31] = value
        data, places = np.frombuffer(told, np.uint8), np.array([start])
        with pytest.raises(FormatError) if is_refused else contextlib.nullcontext():
            b2nd.check_chunks(data, places, np.array([stored]), **sizes)


def test_scratch_memory_ends_with_its_thread_and_that_of_large_slices_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    payload = encode_array("b2nd", _pixels((64, 48), "<i2", "noise"))
    contexts = []

    def decode() -> None:
        decode_array("b2nd", payload)
        contexts.append(weakref.ref(b2nd._of_thread.context))

    thread = threading.Thread(target=decode)
    thread.start()
    thread.join()
    assert [context() for context in contexts] == [None]
    monkeypatch.setattr(b2nd, "_MAX_KEPT_NUM_BYTES", 1024)
    decode_array("b2nd", payload)
    assert b2nd._of_thread.context is None


def test_a_library_that_cannot_be_loaded_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        blosc2_library, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    assert blosc2_library.library.__wrapped__() is None
    (tmp_path / "lib").mkdir()
    place = tmp_path / "lib" / "libblosc2.so"
    place.write_bytes(b"of another system")
    assert blosc2_library.library.__wrapped__() is None
    place.unlink()
    numpy = find_spec("numpy._core._multiarray_umath")
    assert numpy is not None
    place.symlink_to(str(numpy.origin))  # it loads, and has other functions
    assert blosc2_library.library.__wrapped__() is None


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package was built for a library of the system."""
    monkeypatch.setattr(b2nd, "library", lambda: None)
    monkeypatch.setattr(blosc2_library, "_encoding_library", lambda: None)


@pytest.mark.usefixtures("without_library")
def test_decoding_by_the_package_releases_the_gil_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And uses one thread: python-blosc2's default would start as many as there are cores for each slice."""
    calls: list[dict[str, Any]] = []
    real = blosc2.decompress2

    def recorded(source: Any, dst: Any, **keywords: Any) -> None:
        calls.append(keywords)
        real(source, dst=dst, **keywords)

    monkeypatch.setattr(blosc2, "decompress2", recorded)
    pixels = np.arange(256, dtype="<i2").reshape(16, 16)
    assert decode_array("b2nd", encode_array("b2nd", pixels)).tobytes() == pixels.tobytes()
    assert calls == [{"nthreads": 1}]
    assert blosc2.set_releasegil(True) is True  # returns the value before


@pytest.mark.usefixtures("without_library")
def test_a_bad_chunk_is_refused_by_the_package_too() -> None:
    payload = bytearray(encode_array("b2nd", _pixels((64, 48), "<i2", "smooth")))
    start = int.from_bytes(payload[11:15], "big")
    payload[start + 32 : start + 36] = b"\xff" * 4  # where its first block begins
    with pytest.raises(FormatError, match="must decode, got ValueError from blosc2"):
        decode_array("b2nd", bytes(payload))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_of_several_slices_a_bad_one_affects_no_other(codec: str) -> None:
    slices = [np.arange(256, dtype="<u2").reshape(16, 16) + number for number in range(5)]
    payloads = [encode_array(codec, one) for one in slices]
    payloads[1] = payloads[1][:-40]
    payloads[3] = encode_array(codec, slices[3][:8])  # of another size than its place
    outs = [np.zeros((16, 16), "<u2") for _ in slices]
    errors = decode_arrays(codec, payloads, outs)
    assert sorted(errors) == [1, 3]
    for place in (0, 2, 4):
        np.testing.assert_array_equal(outs[place], slices[place])
    for place, error in errors.items():
        with pytest.raises(FormatError) as caught:
            decode_array(codec, payloads[place], out=outs[place])
        assert str(caught.value) == str(error)


def _in_memory(payloads: list[bytes]) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]:
    """Return memory that payloads lie in as in a tar, with room around them, and the payloads in it."""
    places = ROOM_BEFORE + np.cumsum([0, *(len(payload) + 512 for payload in payloads)])
    memory = np.full(places[-1] + room_behind(len(payloads)), 0x55, np.uint8)
    views = [memory[at : at + len(one)] for at, one in zip(places.tolist(), payloads, strict=False)]
    for view, payload in zip(views, payloads, strict=True):
        view[:] = np.frombuffer(payload, np.uint8)
    return memory, views


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is laid around any number of slices, where it takes many."""
    monkeypatch.setattr(b2nd, "_MIN_TOGETHER", 1)


def test_a_frame_is_laid_around_many_slices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _pixels((61, 48), "<u2", "smooth")
    calls: list[int] = []
    decompress = b2nd._decompress_chunks

    def count(frame: NDArray[np.uint8], out: NDArray[Any]) -> None:
        calls.append(len(out))
        decompress(frame, out)

    monkeypatch.setattr(b2nd, "_decompress_chunks", count)
    for num_slices in (1, b2nd._MIN_TOGETHER - 1, b2nd._MIN_TOGETHER, 40):
        memory, views = _in_memory([encode_array("b2nd", one)] * num_slices)
        out = np.zeros((num_slices, *one.shape), one.dtype)
        assert not decode_arrays("b2nd", views, out, memory)
        assert (out == one).all()
    assert calls == [b2nd._MIN_TOGETHER, 40]


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("codec", ["b2nd", FAST])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_in_one_memory_are_decoded_by_one_call(
    codec: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing but their places, and the room around them in memory, is written."""
    shape = (512, 80) if codec == FAST else (61, 48)
    slices = [_pixels(shape, dtype, "noise") for _ in range(7)] + [_pixels(shape, dtype, "smooth")]
    payloads = [encode_array(codec, one) for one in slices]
    memory, views = _in_memory(payloads)
    around = np.full((10, *shape), 7, dtype)

    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(b2nd, "_decompress", refuse)
    threads = Path("/proc/self/task")
    before = len(list(threads.iterdir()))
    assert not decode_arrays("b2nd", views, around[1:9], memory)
    assert len(list(threads.iterdir())) == before
    for found, expected in zip(around[1:9], slices, strict=True):
        assert found.tobytes() == expected.tobytes()
    assert (around[[0, 9]] == 7).all()
    for view, payload in zip(views, payloads, strict=True):
        assert view.tobytes() == payload


def _odd_slices(slices: list[NDArray[Any]], oddity: str) -> list[bytes]:
    payloads = [encode_array("b2nd", one) for one in slices]
    middle = bytearray(payloads[2])
    start = int.from_bytes(middle[11:15], "big")
    match oddity:
        case "cut":
            middle = middle[:-40]
        case "no frame":
            middle = bytearray(b"not a frame" * 40)
        case "another shape":
            middle = bytearray(encode_array("b2nd", slices[2].reshape(48, 64)))
        case "fewer rows":
            middle = bytearray(encode_array("b2nd", slices[2][:32]))
        case "another type":
            middle = bytearray(encode_array("b2nd", slices[2].view("<i2")))
        case "another writer":
            middle = bytearray(blosc2.asarray(slices[2], chunks=(32, 48), blocks=(8, 48)).to_cframe())
        case "one value":
            middle = bytearray(encode_array("b2nd", np.zeros_like(slices[2])))
        case "no values":
            middle[start + 31] |= 0x40
        case "header before it" | "header behind it":  # in all of them
            every = [bytearray(payload) for payload in payloads]
            for payload in every:
                struct.pack_into(">i", payload, 11, -5 if oddity == "header before it" else (1 << 31) - 1)
            return [bytes(payload) for payload in every]
        case "bad block":
            middle[start + 32 : start + 36] = b"\xff" * 4
        case "filters left open":  # in all of them
            every = [bytearray(payload) for payload in payloads]
            for payload in every:
                payload[start + 25] = 0
            return [bytes(payload) for payload in every]
        case "chunk behind its frame":
            struct.pack_into("<i", middle, start + 12, len(middle))
            struct.pack_into(">q", middle, 39, len(middle))
        case _:  # what a chunk states
            where, value = {"size": (4, 64), "double": (4, 12288), "block": (8, 0), "stored": (12, 20)}[
                oddity
            ]
            struct.pack_into("<i", middle, start + where, value)
    return [*payloads[:2], bytes(middle), *payloads[3:]]


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize(
    "oddity",
    [
        *("cut", "no frame", "another shape", "fewer rows", "another type", "another writer", "one value"),
        *("no values", "bad block", "chunk behind its frame", "filters left open"),
        *("header before it", "header behind it"),
        *("size", "double", "block", "stored"),
    ],
)
def test_an_odd_slice_in_one_memory_is_what_it_is_alone(oddity: str) -> None:
    slices = [_pixels((64, 48), "<u2", "smooth") + number for number in range(5)]
    payloads = _odd_slices(slices, oddity)
    memory, views = _in_memory(payloads)
    together, alone = (np.full((7, 64, 48), 7, "<u2") for _ in range(2))
    errors = decode_arrays("b2nd", views, together[1:6], memory)
    expected = decode_arrays("b2nd", payloads, list(alone[1:6]))
    assert {place: str(error) for place, error in errors.items()} == {
        place: str(error) for place, error in expected.items()
    }
    are_all_odd = oddity == "filters left open" or oddity.startswith("header")
    assert set(errors) <= ({0, 1, 2, 3, 4} if are_all_odd else {2})
    for place in {0, 1, 2, 3, 4, 5, 6} - {place + 1 for place in errors}:
        np.testing.assert_array_equal(together[place], alone[place])


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("flag", [0x08, 0x18, 0x30, 0x40])
def test_a_chunk_in_a_file_or_of_one_value_is_not_decoded_together(
    flag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would open the file of the frame around the chunks, and there is none."""
    slices = [_pixels((64, 48), "<u2", "smooth") + number for number in range(3)]
    payloads = [bytearray(encode_array("b2nd", one)) for one in slices]
    payloads[1][int.from_bytes(payloads[1][11:15], "big") + 31] |= flag
    memory, views = _in_memory([bytes(payload) for payload in payloads])

    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(b2nd, "_decompress_chunks", refuse)
    out = np.zeros((3, 64, 48), "<u2")
    assert set(decode_arrays("b2nd", views, out, memory)) <= {1}
    for place in (0, 2):
        np.testing.assert_array_equal(out[place], slices[place])


def test_a_frame_that_leaves_values_open_is_refused() -> None:
    """They would be what was in memory, such as pixels of another patient."""
    blank = blosc2.uninit((64, 48), dtype="<u2", contiguous=True).to_cframe()
    wider = bytearray(encode_array("b2nd", _pixels((64, 48), "<u2", "smooth")))
    # Blocks that reach beyond the array need longer chunks.
    parts = b"".join(b"\xd2" + struct.pack(">i", size) for size in (64, 48))
    at = wider.rindex(parts, 0, int.from_bytes(wider[11:15], "big")) + len(parts) - 4
    struct.pack_into(">i", wider, at, 60)
    for payload in (bytes(blank), bytes(wider)):
        with pytest.raises(FormatError, match="a chunk must have"):
            decode_array("b2nd", payload)


@pytest.mark.parametrize("flag", [0x08, 0x28, 0x40])
def test_a_chunk_whose_blocks_are_elsewhere_is_refused(flag: int) -> None:
    values = _pixels((64, 48), "<u2", "smooth")
    chunk = np.frombuffer(b2nd.encode_chunk(values, (64, 48), is_fast=False), np.uint8).copy()
    told = {"num_bytes": values.nbytes, "block_num_bytes": values.nbytes}
    place, size = np.zeros(1, np.int64), np.array([len(chunk)])
    b2nd.check_chunks(chunk, place, size, **told)
    chunk[31] |= flag
    with pytest.raises(FormatError, match="a chunk must hold"):
        b2nd.check_chunks(chunk, place, size, **told)


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("lack", ["room before", "room behind", "another memory", "read-only", "one array"])
def test_slices_without_room_around_them_are_decoded_one_by_one(lack: str) -> None:
    slices = [_pixels((64, 48), "<u2", "smooth") + number for number in range(3)]
    memory, views = _in_memory([encode_array("b2nd", one) for one in slices])
    outs: Any = np.zeros((3, 64, 48), "<u2")
    match lack:
        case "room before":
            memory = memory[1:]
        case "room behind":
            memory = memory[: -room_behind(3) - 500]
        case "another memory":
            memory = memory.copy()
        case "read-only":
            for view in views:
                view.flags.writeable = False
        case _:
            outs = [np.zeros((64, 48), "<u2") for _ in slices]
    before = memory.copy()
    assert not decode_arrays("b2nd", views, outs, memory)
    for found, expected in zip(outs, slices, strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(memory, before)


def test_what_encodes_nothing_imports_no_blosc2(tmp_path: Path) -> None:
    """A second of every `shardflow info`, and of every process that trains."""
    (tmp_path / "slice").write_bytes(encode_array("b2nd", _pixels((64, 48), "<i2", "noise")))
    code = (
        "import sys, pathlib, shardflow.fields.decode; from shardflow.format import decode_array\n"
        "decode_array('b2nd', pathlib.Path(sys.argv[1]).read_bytes()); sys.exit('blosc2' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "slice")]
    assert subprocess.run(command, check=False).returncode == 0
