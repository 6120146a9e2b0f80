"""Test that the full cache admits every token."""

from kvjax.policies import make_policy
from tests.policies.admission.admitted import kept
from tests.policies.steps import step


def test_full_keeps_everything():
    assert kept(make_policy("full"), step([[0, 5, 900]])).all()
