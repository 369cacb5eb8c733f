"""The cost model against sums done by hand."""

import pytest
from hypothesis import given, settings
from mesh_by_hand import meshes, messages

from flipper.errors import UsageError
from flipper.mesh.chips import Mesh
from flipper.mesh.cost import Links, seconds
from flipper.mesh.plan import forms, plan
from flipper.mesh.ring2d import FORMS, ring2d
from flipper.mesh.workload import MODELS, Training

LINKS = Links(bandwidth=1e9, latency=1e-5)


def test_a_ring_takes_two_rounds_of_steps_with_half_a_share_each_way():
    """2 (n - 1) steps, each a latency and 1 / 2n of the vector."""
    n, size = 24, 48e6
    by_hand = 2 * (n - 1) * (1e-5 + size / (2 * n) / 1e9)
    assert seconds(plan(Mesh.parse("4x6"), "ring"), size, LINKS) == pytest.approx(by_hand, rel=1e-12)


def test_row_pairs_take_their_rings_then_their_columns():
    """4 x 6: two rings of 12 over row pairs. Each chip and its partner two rows below then exchange 1/24 of a half.

    A link between the pairs carries what both chips of a column send, in both halves: four messages at once.
    """
    size = 48e6
    rows = 2 * 11 * (1e-5 + size / 24 / 1e9)
    columns = 2 * 1 * (2e-5 + 4 * size / 48 / 1e9)
    schedule = ring2d(Mesh.parse("4x6"), FORMS[0])
    assert str(FORMS[0]) == "row pairs"
    assert seconds(schedule, size, LINKS) == pytest.approx(rows + columns, rel=1e-12)


def test_two_chips_send_each_other_both_halves_by_one_link():
    by_hand = 2 * (1e-5 + 2 * 10e6 / 4 / 1e9)
    assert seconds(plan(Mesh.parse("1x2"), "ring"), 10e6, LINKS) == pytest.approx(by_hand, rel=1e-12)


def test_one_chip_has_nothing_to_wait_for():
    assert seconds(plan(Mesh.parse("1x1"), "ring"), 10e6, LINKS) == 0


@settings(max_examples=40)
@given(meshes())
def test_each_step_takes_its_longest_way_and_its_busiest_link(mesh):
    for schedule in forms(mesh, "ring"):
        by_hand = 0.0
        chunk = 1e6 / schedule.chunks
        for _, sent in messages(schedule):
            busy: dict[object, float] = {}
            for each in sent:
                for link in zip(each.way, each.way[1:], strict=False):
                    busy[link] = busy.get(link, 0.0) + len(each.chunks) * chunk
            if sent:
                by_hand += 1e-5 * max(len(each.way) - 1 for each in sent) + max(busy.values()) / 1e9
        assert seconds(schedule, 1e6, LINKS) == pytest.approx(by_hand, rel=1e-9)


def test_the_quickest_form_is_taken():
    for size in (1e3, 1e9):
        mesh = Mesh.parse("8x8", ["2x2@2,2"])
        taken = seconds(plan(mesh, "ring2d", size, LINKS), size, LINKS)
        assert taken == min(seconds(each, size, LINKS) for each in forms(mesh, "ring2d"))


@pytest.mark.parametrize("wrong", [{"bandwidth": 0}, {"bandwidth": float("nan")}, {"latency": -1}])
def test_links_that_can_not_be_are_refused(wrong):
    with pytest.raises(UsageError, match="--link-"):
        Links(**wrong)


def test_a_step_adds_what_computing_does_not_hide():
    training = Training("resnet50", compute=0.1, overlap=0.25)
    assert training.step(0.02) == pytest.approx(0.1)
    assert training.step(0.065) == pytest.approx(0.14)
    record = training.record(allreduce=0.065, intact=0.045, living=0.75)
    assert record["step_overhead"] == pytest.approx(0.14 / 0.12 - 1)
    assert record["throughput"] == pytest.approx(0.75 * 0.12 / 0.14)


def test_computing_follows_from_samples_operations_and_speed():
    training = Training("resnet50", samples=10, speed=1e12, utilization=0.5)
    assert training.compute_seconds == pytest.approx(10 * 3 * 2 * 4.09e9 / 0.5e12)


def test_gradients_have_the_bytes_of_their_dtype():
    assert Training("resnet50").size == 4 * 25_557_032
    assert Training("bert-large", dtype="bfloat16").size == 2 * 335_141_888


def test_the_parameters_of_bert_large_are_those_of_its_layers():
    """Embeddings of 30,522 words, 512 places, 2 segments, and a norm; 24 layers; the pooler."""
    width, inner = 1024, 4096
    embeddings = (30_522 + 512 + 2 + 2) * width
    attention = 4 * (width * width + width) + 2 * width
    dense = 2 * width * inner + inner + width + 2 * width
    assert MODELS["bert-large"].parameters == embeddings + 24 * (attention + dense) + width * width + width


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": "vgg"}, "known: resnet50, bert-large"),
        ({"model": "resnet50", "dtype": "int4"}, "known: float32, bfloat16"),
        ({"model": "resnet50", "overlap": 1.5}, "--overlap"),
        ({"model": "resnet50", "utilization": 0.0}, "--utilization"),
    ],
)
def test_trainings_that_can_not_be_are_refused(wrong, said):
    with pytest.raises(UsageError, match=said):
        Training(**wrong)
