"""INT4 storage: exact round trips at every value and at odd widths, and refusal of values that do not fit a nibble."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from otf_llm.packing import pack_int4, packed_width, unpack_int4


def test_every_pair_of_nibbles():
    """All 16 x 16 bytes decode to their nibbles - 8; the 15 x 15 without a -8 pack back to the same byte."""
    every_byte = torch.arange(256, dtype=torch.uint8)[:, None]
    q = unpack_int4(every_byte, 2)
    expected = torch.tensor([[byte % 16 - 8, byte // 16 - 8] for byte in range(256)], dtype=torch.int8)
    assert torch.equal(q, expected)
    storable = (q > -8).all(dim=1)
    assert int(storable.sum()) == 15 * 15
    assert torch.equal(pack_int4(q[storable]), every_byte[storable])
    for pair in q[~storable]:
        with pytest.raises(ValueError, match="outside"):
            pack_int4(pair[None])


@given(st.data())
def test_round_trip(data):
    rows = data.draw(st.integers(0, 4))
    columns = data.draw(st.integers(0, 9))
    values = data.draw(st.lists(st.integers(-7, 7), min_size=rows * columns, max_size=rows * columns))
    q = torch.tensor(values, dtype=torch.int8).reshape(rows, columns)
    codes = pack_int4(q)
    assert codes.dtype is torch.uint8
    assert codes.shape == (rows, packed_width(columns))
    assert torch.equal(unpack_int4(codes, columns), q)


@pytest.mark.parametrize("columns", [63, 1, 127, 257, 4055])
def test_odd_count_keeps_its_last_column(columns):
    """Without its outliers K = 64, 129, 260 or 4096 leaves an odd count: the last byte holds one column and q = 0."""
    q = torch.zeros(2, columns, dtype=torch.int8)
    q[:, -1] = torch.tensor([7, -7])
    codes = pack_int4(q)
    assert codes.shape == (2, (columns + 1) // 2)
    assert codes[:, -1].tolist() == [0x8F, 0x81]
    assert (codes[:, :-1] == 0x88).all()
    assert torch.equal(unpack_int4(codes, columns), q)


@pytest.mark.parametrize("outside", [-8, 8, -128, 127])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_value_outside_the_nibble_is_refused(outside, column):
    """A value that rounded one step too far would change its neighbour's bits."""
    q = torch.zeros(1, 3, dtype=torch.int8)
    q[0, column] = outside
    with pytest.raises(ValueError, match=rf"from {min(outside, 0)} to {max(outside, 0)}, outside \[-7, 7\]"):
        pack_int4(q)


def test_one_value_leaves_its_neighbours_alone():
    for value in range(-7, 8):
        for column in range(4):
            q = torch.zeros(1, 4, dtype=torch.int8)
            q[0, column] = value
            assert torch.equal(unpack_int4(pack_int4(q), 4), q)


def test_views_pack_like_their_copies():
    q = torch.randint(-7, 8, (6, 10), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    for view in (q.T, q[::2, 1::2], q[:, 3:]):
        assert torch.equal(pack_int4(view), pack_int4(view.contiguous()))
        assert pack_int4(view).is_contiguous()


@pytest.mark.parametrize(("shape", "dtype"), [((3, 4), torch.float32), ((4,), torch.int8), ((1, 1), torch.uint8)])
def test_pack_refuses_other_tensors(shape, dtype):
    q = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match="q must be int8 with 2 dimensions"):
        pack_int4(q)


def test_unpack_refuses_a_width_that_does_not_match():
    codes = pack_int4(torch.zeros(2, 5, dtype=torch.int8))
    for columns in (4, 7, 0, -1):
        with pytest.raises(ValueError, match=f"3 bytes a row, but {columns} columns"):
            unpack_int4(codes, columns)
    with pytest.raises(ValueError, match="codes must be uint8"):
        unpack_int4(codes.to(torch.int8), 5)
