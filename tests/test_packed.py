import dataclasses
import pickle
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from taut.packed import PackedBatch

FIELDS = ("tokens", "cu_seqlens", "max_seqlen", "positions", "sample_ids", "targets")
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=9)
KINDS = st.sampled_from([(torch.int32, ()), (torch.int64, (2,)), (torch.float32, (3, 2))])


def make_tensor(shape, dtype, gen):
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, generator=gen)
    return torch.randint(0, 1000, shape, dtype=dtype, generator=gen)


def make_parts(lengths, kind=(torch.int64, ())):
    """Random sequences, targets with gaps, and sample ids in no order."""
    dtype, trailing = kind
    gen = torch.Generator().manual_seed(sum(lengths))
    sequences = [make_tensor((n, *trailing), dtype, gen) for n in lengths]
    targets = [torch.randint(0, 9, (n,), generator=gen) for n in lengths]
    for target in targets:
        target[::3] = -100
    return sequences, targets, torch.randperm(100, generator=gen)[: len(lengths)]


def make_fields(**changes):
    """Three sequences of 3, 0 and 2 tokens as constructor arguments."""
    fields = {
        "tokens": torch.tensor([5, 6, 7, 8, 9]),
        "cu_seqlens": torch.tensor([0, 3, 3, 5], dtype=torch.int32),
        "max_seqlen": 3,
        "positions": torch.tensor([0, 1, 2, 0, 1]),
        "sample_ids": torch.tensor([4, 2, 8]),
        "targets": torch.tensor([-100, 1, 2, 3, -100]),
    }
    return fields | changes


def check(*strategies):
    """A property test; without a deadline, since shared cores stall."""
    return lambda test: settings(deadline=None)(given(*strategies)(test))


def refused(*parts):
    """Expect a ValueError whose message holds the parts in this order."""
    return pytest.raises(ValueError, match=".*".join(map(re.escape, parts)))


@check(LENGTHS, KINDS)
@example([0], (torch.int64, ()))
@example([0, 0, 0], (torch.float32, (3, 2)))
def test_sequences_come_back_as_they_went_in(lengths, kind):
    sequences, targets, sample_ids = make_parts(lengths, kind)
    batch = PackedBatch.from_sequences(sequences, targets, sample_ids)
    assert (batch.num_sequences, batch.num_tokens) == (len(lengths), sum(lengths))
    assert batch.max_seqlen == max(lengths)
    assert batch.tokens.dtype == kind[0]
    assert batch.lengths.tolist() == lengths
    assert batch.lengths.dtype == batch.cu_seqlens.dtype == torch.int32
    assert torch.equal(batch.sample_ids, sample_ids)
    for i, (start, end) in enumerate(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
        assert torch.equal(batch.tokens[start:end], sequences[i])
        assert torch.equal(batch.targets[start:end], targets[i])
        assert batch.positions[start:end].tolist() == list(range(lengths[i]))


def test_lists_of_ints_pack_like_tensors():
    batch = PackedBatch.from_sequences(
        [[5, 6, 7], [], [8, 9]], [[-100, 1, 2], [], [3, -100]], [4, 2, 8]
    )
    assert batch == PackedBatch(**make_fields())


def test_without_targets_and_sample_ids_all_are_minus_100_and_counted():
    batch = PackedBatch.from_sequences([[1, 2], [3]])
    assert batch.targets.tolist() == [-100, -100, -100]
    assert batch.sample_ids.tolist() == [0, 1]


def test_int32_tokens_stay_and_int32_targets_and_sample_ids_widen():
    ids = torch.tensor([1, 2], dtype=torch.int32)
    batch = PackedBatch.from_sequences([ids], [ids], ids[:1])
    dtypes = (batch.tokens.dtype, batch.targets.dtype, batch.sample_ids.dtype)
    assert dtypes == (torch.int32, torch.int64, torch.int64)
    padded = PackedBatch.from_padded(ids[None], ids[None] > 0, ids[None])
    assert (padded.tokens.dtype, padded.targets.dtype) == (torch.int32, torch.int64)


def test_features_keep_their_gradient():
    patches = [torch.ones(2, 3, requires_grad=True), torch.ones(1, 3, requires_grad=True)]
    padded, _, _ = PackedBatch.from_sequences(patches).to_padded()
    weighted = padded * torch.tensor([[1.0, 2.0], [3.0, 4.0]])[..., None]
    grads = torch.autograd.grad(weighted.sum(), patches)
    assert [grad[:, 0].tolist() for grad in grads] == [[1, 2], [3]]


def test_targets_of_another_length_name_the_sequence():
    sequences, targets, _ = make_parts([2, 3, 1, 7])
    targets[3] = targets[3][:6]
    with refused("sequence 3 has 7 tokens but its targets have 6"):
        PackedBatch.from_sequences(sequences, targets)


@pytest.mark.parametrize(
    "bad", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor([[1]]), [0.5]], ids=str
)
def test_targets_that_are_not_1_d_integers_name_the_sequence(bad):
    with refused("sequence 1 has 1 tokens but its targets have 1, as (1", "int64 id on cpu"):
        PackedBatch.from_sequences([[1], [2]], [[1], bad])


def test_targets_on_another_device_name_the_sequence():
    with refused("sequence 1", "on meta", "on cpu"):
        PackedBatch.from_sequences([[1], [2]], [[1], torch.ones(1, device="meta").long()])


def test_as_many_targets_as_sequences():
    with refused("2 sequences but 1 targets"):
        PackedBatch.from_sequences([[1], [2]], [[1]])


@pytest.mark.parametrize(
    ("other", "came"),
    [
        (torch.ones(2, dtype=torch.int32), "(2,) torch.int32 on cpu"),
        (torch.ones(2, 3, dtype=torch.int64), "(2, 3) torch.int64 on cpu"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "(2,) torch.int64 on meta"),
    ],
)
def test_unlike_sequences_are_named(other, came):
    with refused("alike", f"sequence 2 is {came} and sequence 0 (1,) torch.int64 on cpu"):
        PackedBatch.from_sequences([[1], [2], other])


def test_one_flat_list_is_no_list_of_sequences():
    flat: list = [1, 2, 3]
    with refused("sequences must be (n, ...)", "sequence 0 is () torch.int64"):
        PackedBatch.from_sequences(flat)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PackedBatch.from_sequences([]),
        lambda: PackedBatch.from_padded(torch.ones(0, 4), torch.ones(0, 4).bool()),
        lambda: PackedBatch(
            **make_fields(
                cu_seqlens=torch.zeros(1, dtype=torch.int32), sample_ids=torch.zeros(0).long()
            )
        ),
        lambda: PackedBatch(**make_fields(cu_seqlens=torch.zeros(0, dtype=torch.int32))),
    ],
    ids=["from_sequences", "from_padded", "constructor", "no offsets"],
)
def test_a_batch_of_no_sequences_is_refused(make):
    with refused("at least one sequence; got none"):
        make()


@st.composite
def padded_inputs(draw):
    dtype, trailing = draw(KINDS)
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(0, 40))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    mask = torch.rand(rows, columns, generator=gen) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    tokens = make_tensor((rows, columns, *trailing), dtype, gen)
    targets = torch.randint(0, 9, (rows, columns), generator=gen)
    return tokens, mask, targets


@check(padded_inputs(), st.sampled_from([torch.bool, torch.int64, torch.uint8]))
def test_any_pattern_of_padding_equals_packing_the_real_tokens(padded, mask_dtype):
    tokens, mask, targets = padded
    rows = range(len(tokens))
    want = PackedBatch.from_sequences(
        [tokens[i][mask[i]] for i in rows], [targets[i][mask[i]] for i in rows]
    )
    assert PackedBatch.from_padded(tokens, mask.to(mask_dtype), targets) == want


@check(LENGTHS, KINDS)
@example([0, 0], (torch.int64, ()))
def test_padding_and_back_is_exact(lengths, kind):
    sequences, targets, sample_ids = make_parts(lengths, kind)
    batch = PackedBatch.from_sequences(sequences, targets, sample_ids)
    assert PackedBatch.from_padded(*batch.to_padded(), sample_ids) == batch


@check(padded_inputs())
def test_unpadding_and_padding_again_moves_the_real_tokens_left(padded):
    was_tokens, was_mask, was_targets = padded
    tokens, mask, targets = PackedBatch.from_padded(*padded).to_padded()
    assert torch.equal(mask, was_mask.sort(descending=True).values[:, : mask.shape[1]])
    assert torch.equal(tokens[mask], was_tokens[was_mask])
    assert torch.equal(targets[mask], was_targets[was_mask])


def test_to_padded_pads_on_the_right_to_the_longest():
    tokens, mask, targets = PackedBatch(**make_fields()).to_padded(padding=77)
    assert tokens.tolist() == [[5, 6, 7], [77, 77, 77], [8, 9, 77]]
    assert mask.tolist() == [[True] * 3, [False] * 3, [True, True, False]]
    assert targets.tolist() == [[-100, 1, 2], [-100] * 3, [3, -100, -100]]
    assert (tokens.dtype, mask.dtype) == (torch.int64, torch.bool)


def test_to_padded_goes_by_place_not_by_position():
    shifted = PackedBatch(**make_fields(positions=torch.tensor([10, 11, 12, 5, 5])))
    assert shifted.to_padded()[0].tolist() == [[5, 6, 7], [0, 0, 0], [8, 9, 0]]


def test_without_targets_a_padded_batch_has_none():
    batch = PackedBatch.from_padded(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]))
    assert batch.targets.tolist() == [-100]
    assert batch.positions.tolist() == [0]


@pytest.mark.parametrize(
    ("tokens", "mask", "targets"),
    [
        ((3,), (3,), (3,)),
        ((2, 3), (2, 4), (2, 3)),
        ((2, 3), (2, 3), (3, 2)),
        ((6, 2), (6,), (6, 2)),
    ],
)
def test_padded_shapes_must_agree(tokens, mask, targets):
    with refused("(B, S, ...)", f"got {tokens}, {mask}, {targets}"):
        PackedBatch.from_padded(
            torch.ones(tokens), torch.ones(mask).bool(), torch.ones(targets).long()
        )


@pytest.mark.parametrize("bad", [[[1, 2]], [[0, -1]], [[0.0, 1.0]]], ids=str)
def test_a_mask_of_anything_but_0_and_1_is_refused(bad):
    mask = torch.tensor(bad)
    values = str(mask.unique().tolist())
    with refused("bool or integers 0 and 1", f"got {mask.dtype} with values {values}"):
        PackedBatch.from_padded(torch.ones(1, 2), mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.complex64], ids=str)
def test_tokens_are_ids_or_features(dtype):
    with refused("tokens must be", "int32 or int64 ids or floating features", f"got (5,) {dtype}"):
        PackedBatch(**make_fields(tokens=torch.ones(5, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_features_may_be_of_any_floating_dtype_and_negative(dtype):
    tokens = torch.full((5, 2), -1.0, dtype=dtype)
    assert torch.equal(PackedBatch(**make_fields(tokens=tokens)).tokens, tokens)


def test_tokens_need_a_token_dimension():
    with refused("tokens must be (T, ...)", "got () torch.int64"):
        PackedBatch(**make_fields(tokens=torch.tensor(1)))


def test_more_tokens_than_int32_offsets_can_count_are_refused():
    too_many = torch.empty(2**31, dtype=torch.int32, device="meta")
    with refused("below 2**31", "got (2147483648,)"):
        PackedBatch(**make_fields(tokens=too_many))


@pytest.mark.parametrize("name", ["cu_seqlens", "positions", "sample_ids", "targets"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_field_has_one_dtype_shape_and_device(name, device):
    fields = dataclasses.asdict(PackedBatch(**make_fields()).to(device))
    right = fields[name]
    wrong_dtype = right.to(torch.int64 if name == "cu_seqlens" else torch.int32)
    elsewhere = torch.empty_like(right, device="meta" if device == "cpu" else "cpu")
    wrongs = [wrong_dtype, right.float(), right[:, None], elsewhere]
    if name != "cu_seqlens":  # the others are held to its size
        wrongs += [right[1:], torch.cat([right, right[:1]])]
    for wrong in wrongs:
        came = f"got {tuple(wrong.shape)} {wrong.dtype} on {wrong.device}"
        with refused(f"{name} of 3 sequences, 5 tokens must be", came):
            PackedBatch(**fields | {name: wrong})


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("bad", [3.0, torch.tensor(3)], ids=str)
def test_max_seqlen_is_an_int(bad, device):
    fields = dataclasses.asdict(PackedBatch(**make_fields()).to(device))
    with refused("max_seqlen must be an int", f"got {bad!r}"):
        PackedBatch(**fields | {"max_seqlen": bad})


@pytest.mark.parametrize(
    ("offsets", "came"),
    [
        ([1, 3, 3, 5], "got 1 to 5"),
        ([0, 3, 3, 4], "got 0 to 4"),
        ([0, 3, 3, 6], "got 0 to 6"),
        ([0, 4, 2, 5], "smallest step of -2"),
        ([0, 2**31 - 1, -(2**31), 5], "smallest step of -4294967295"),
    ],
)
def test_cu_seqlens_is_a_running_sum_from_0_to_the_tokens(offsets, came):
    with refused("cu_seqlens must start at 0, not decrease and end at 5 tokens", came):
        PackedBatch(**make_fields(cu_seqlens=torch.tensor(offsets, dtype=torch.int32)))


@pytest.mark.parametrize("wrong", [0, 2, 4, 5])
def test_max_seqlen_is_the_largest_length(wrong):
    with refused("max_seqlen must be the largest length", f"got {wrong}", "pass 3"):
        PackedBatch(**make_fields(max_seqlen=wrong))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("tokens", -1, "token ids must not be negative"),
        ("positions", -2, "positions must not be negative"),
        ("targets", -1, "targets must be at least 0, or -100"),
        ("targets", -101, "targets must be at least 0, or -100"),
    ],
)
@pytest.mark.parametrize(("token", "place"), [(0, (0, 0)), (2, (0, 2)), (3, (2, 0)), (4, (2, 1))])
def test_a_bad_value_is_named_with_its_sequence_and_token(name, value, rule, token, place):
    fields = make_fields()
    fields[name][token] = value
    with refused(rule, f"got {value} in sequence {place[0]} at its token {place[1]}"):
        PackedBatch(**fields)


def test_a_negative_id_inside_a_wider_token_is_found():
    ids = torch.ones(5, 2, dtype=torch.int64)
    ids[3, 1] = -7
    with refused("token ids", "got -7 in sequence 2 at its token 0"):
        PackedBatch(**make_fields(tokens=ids))


@pytest.mark.parametrize(
    ("ids", "came"),
    [([4, 2, 4], [4]), ([0, -1, 1], [-1]), ([0, 2**32, 1], [2**32]), ([9, 9, -3], [-3, 9])],
)
def test_sample_ids_are_unique_32_bit_numbers(ids, came):
    with refused("sample_ids must be unique and at least 0 and below 2**32", f"got {came}"):
        PackedBatch(**make_fields(sample_ids=torch.tensor(ids)))


def test_the_whole_range_of_sample_ids_is_allowed():
    ids = torch.tensor([2**32 - 1, 0, 2**31])
    assert torch.equal(PackedBatch(**make_fields(sample_ids=ids)).sample_ids, ids)


@pytest.mark.parametrize("bad", [[0.5, 1.0], [True, False], [0, 1, 2], [[0], [1]]], ids=str)
def test_sample_ids_are_one_integer_a_sequence(bad):
    with refused("sample_ids of 2 sequences", "must be (2,) torch.int64"):
        PackedBatch.from_sequences([[1], [2]], sample_ids=bad)


@check(LENGTHS, st.data())
def test_a_shifted_offset_is_refused_or_makes_another_batch(lengths, data):
    batch = PackedBatch.from_sequences(*make_parts(lengths))
    index = data.draw(st.integers(0, len(lengths)))
    shift = data.draw(st.integers(-3, 3).filter(bool))
    offsets = batch.cu_seqlens.clone()
    offsets[index] += shift
    kept_length = index not in (0, len(lengths)) and (offsets.diff() >= 0).all()
    if kept_length and offsets.diff().max() == batch.max_seqlen:
        assert dataclasses.replace(batch, cu_seqlens=offsets) != batch
    else:
        with refused("must"):
            dataclasses.replace(batch, cu_seqlens=offsets)


@pytest.mark.parametrize("name", FIELDS)
def test_a_change_in_any_field_makes_batches_unequal(name):
    batch = PackedBatch(**make_fields())
    other = PackedBatch(**make_fields())
    assert other == batch
    value = getattr(other, name)
    changed = value + 1 if name == "max_seqlen" else value.clone()
    if name != "max_seqlen":
        changed[-1] += 1
    object.__setattr__(other, name, changed)
    assert other != batch


def test_equality_includes_dtype_shape_and_device():
    batch = PackedBatch(**make_fields())
    tokens = batch.tokens
    for other in (tokens.int(), tokens.double(), tokens[:, None]):
        assert PackedBatch(**make_fields(tokens=other)) != batch
    assert batch.to("meta") != batch
    assert PackedBatch.from_sequences([[5, 6, 7]]) != batch


def test_other_types_are_left_to_decide_on_equality():
    class EqualToAll:
        def __eq__(self, other):
            return True

    batch = PackedBatch(**make_fields())
    assert batch.__eq__("text") is NotImplemented
    assert batch != "text"
    assert batch == EqualToAll()


def test_a_batch_is_frozen_and_has_no_hash():
    batch = PackedBatch(**make_fields())
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.max_seqlen = 4  # type: ignore[misc]
    with pytest.raises(TypeError, match="unhashable"):
        hash(batch)


def test_repr_is_one_line_of_sizes():
    batch = PackedBatch(**make_fields())
    want = "PackedBatch(3 sequences, 5 tokens, longest 3, (5,) torch.int64 on cpu)"
    assert repr(batch) == want
    assert repr(batch.to("meta")) == want.replace("cpu", "meta")


def test_to_moves_every_tensor_and_keeps_shapes():
    batch = PackedBatch.from_sequences([torch.ones(4, 2), torch.ones(0, 2)])
    moved = batch.to("meta")
    for name in FIELDS:
        was, now = getattr(batch, name), getattr(moved, name)
        if name == "max_seqlen":
            assert now == was
        else:
            assert now.device.type == "meta"
            assert (now.shape, now.dtype) == (was.shape, was.dtype)
    assert moved.token_sample_ids.shape == (4,)
    assert [x.shape for x in moved.to_padded()] == [(2, 4, 2), (2, 4), (2, 4)]
    assert batch.to("cpu") == batch


def test_to_passes_non_blocking_on(monkeypatch):
    batch = PackedBatch(**make_fields())
    calls = []

    def record(self, *args, **kwargs):
        calls.append((args, kwargs))
        return self

    monkeypatch.setattr(torch.Tensor, "to", record)
    batch.to("cpu", non_blocking=True)
    assert calls == [(("cpu",), {"non_blocking": True})] * 5


def test_moving_and_splitting_read_no_values(monkeypatch):
    batch = PackedBatch(**make_fields())
    monkeypatch.setattr(PackedBatch, "__post_init__", None)  # any check would now raise
    assert batch.to("cpu") == batch
    assert batch.split(3) == [batch]


def test_values_are_read_on_the_cpu_only():
    fields = dataclasses.asdict(PackedBatch(**make_fields()).to("meta"))
    assert PackedBatch(**fields | {"max_seqlen": 1}).max_seqlen == 1


def test_pin_memory_is_refused_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with refused("pin_memory needs an accelerator; got none"):
        PackedBatch(**make_fields()).pin_memory()


def test_pin_memory_pins_every_tensor(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    pinned = []

    def pin(self):
        pinned.append(self)
        return self.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = PackedBatch(**make_fields())
    copy = batch.pin_memory()
    assert copy == batch
    tensors = [getattr(batch, name) for name in FIELDS if name != "max_seqlen"]
    assert {id(x) for x in pinned} == {id(x) for x in tensors}
    assert copy.tokens is not batch.tokens


def test_a_batch_passes_between_loader_processes():
    batch = PackedBatch(**make_fields())
    assert pickle.loads(pickle.dumps(batch)) == batch


@st.composite
def lengths_and_cuts(draw):
    lengths = draw(LENGTHS)
    counts, left = [], len(lengths)
    while left > 0:
        counts.append(draw(st.integers(1, left)))
        left -= counts[-1]
    return lengths, draw(st.sampled_from([counts, counts[0]]))


@check(lengths_and_cuts(), KINDS)
def test_split_pieces_put_together_are_the_batch(lengths_cuts, kind):
    lengths, cuts = lengths_cuts
    whole = PackedBatch.from_sequences(*make_parts(lengths, kind))
    whole = dataclasses.replace(whole, positions=whole.positions + 5)  # they must not be recounted
    pieces = whole.split(cuts)
    counts = [len(piece) for piece in torch.arange(len(lengths)).split(cuts)]
    assert [piece.num_sequences for piece in pieces] == counts
    for piece in pieces:  # built without checks, so checked here
        assert PackedBatch(**{name: getattr(piece, name) for name in FIELDS}) == piece
    joined = {
        name: torch.cat([getattr(piece, name) for piece in pieces])
        for name in ("tokens", "positions", "sample_ids", "targets")
    }
    cu_seqlens = F.pad(torch.cat([piece.lengths for piece in pieces]).cumsum(0), (1, 0)).int()
    longest = max(piece.max_seqlen for piece in pieces)
    assert PackedBatch(cu_seqlens=cu_seqlens, max_seqlen=longest, **joined) == whole


def test_split_takes_no_copy_of_the_tokens():
    batch = PackedBatch(**make_fields())
    assert batch.split([1, 2])[1].tokens.data_ptr() == batch.tokens[3:].data_ptr()


@pytest.mark.parametrize("bad", [0, -1, [], [1, 1], [2, 2], [3, 0], [4, -1]], ids=str)
def test_split_refuses_counts_that_do_not_cover_the_batch(bad):
    with refused("positive counts that sum to all 3; got " + str(bad)):
        PackedBatch(**make_fields()).split(bad)


def test_each_token_knows_its_sample():
    batch = PackedBatch(**make_fields())
    assert batch.token_sample_ids.tolist() == [4, 4, 4, 8, 8]
    assert batch.token_sample_ids.dtype == torch.int64
    assert batch.token_sample_ids is batch.token_sample_ids
    assert [x.token_sample_ids.tolist() for x in batch.split(2)] == [[4, 4, 4], [8, 8]]


def test_derived_tensors_need_no_values_from_the_device():
    # a meta tensor has no values: whatever waits for a GPU's answer raises here
    batch = PackedBatch(**make_fields()).to("meta")
    shapes = (batch.lengths.shape, batch.token_sample_ids.shape, batch.to_padded()[0].shape)
    assert shapes == ((3,), (5,), (3, 3))
    packed = PackedBatch.from_sequences([batch.tokens, batch.tokens[:2]])
    assert (packed.positions.shape, packed.max_seqlen) == ((7,), 5)


@check(LENGTHS)
def test_token_sample_ids_equal_a_loop(lengths):
    batch = PackedBatch.from_sequences(*make_parts(lengths))
    want = [i for i, n in zip(batch.sample_ids.tolist(), lengths, strict=True) for _ in range(n)]
    assert batch.token_sample_ids.tolist() == want


def test_compiled_code_reads_a_batch_without_graph_breaks():
    def sums(batch):
        return batch.tokens.sum() + batch.token_sample_ids.sum() + batch.lengths.max()

    batch = PackedBatch(**make_fields())
    compiled = torch.compile(sums, fullgraph=True, backend="eager")
    assert compiled(batch) == sums(PackedBatch(**make_fields()))


def test_rows_with_a_target_starts_and_ends():
    batch = PackedBatch.from_sequences(
        [[], [1, 2, 3], [], [4], [5, 6], []], [[], [-100, 7, -100], [], [0], [-100, -100], []]
    )
    assert batch.target_rows.tolist() == [1, 3]
    assert batch.starts.tolist() == [True, False, False, True, True, False]
    assert batch.ends.tolist() == [False, False, True, True, False, True]
    empty = PackedBatch.from_sequences([[], []])
    assert empty.target_rows.shape == empty.starts.shape == empty.ends.shape == (0,)


def test_rows_that_were_found_go_along_to_another_device():
    """There a GPU would have to be waited for."""
    batch = PackedBatch.from_sequences([[1, 2, 3]], [[-100, 7, -100]])
    assert "_target_rows" not in batch.to("cpu").__dict__
    rows = batch.target_rows
    moved = batch.to("meta")
    assert moved.target_rows.device.type == "meta"
    assert moved.target_rows.shape == rows.shape
