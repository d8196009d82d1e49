"""Policies: which blocks of a request are backed up."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_core.cache.index import PrefixIndex
from hicache_core.cache.policies import POLICIES, policy_named
from hicache_core.errors import UnknownNameError


def test_write_through_wants_every_block_that_the_host_lacks() -> None:
    """Positions come in ascending order; what the host has is not copied again."""
    host = PrefixIndex().host
    for key in "ac":
        host.insert(key, np.arange(1))
    policy = policy_named("write_through")
    assert policy.to_back_up("abcd", host) == [1, 3]
    assert policy.to_back_up("ca", host) == []
    assert policy.to_back_up("", host) == []


def test_policies_are_found_by_name() -> None:
    """Every name of the table gives a policy of its own type."""
    assert list(POLICIES) == ["write_through"]
    assert all(type(policy_named(name)) is kind for name, kind in POLICIES.items())


def test_unknown_policy_is_refused_with_the_names_that_exist() -> None:
    """A typing error never becomes a silent default."""
    with pytest.raises(UnknownNameError) as caught:
        policy_named("write-through")
    assert caught.value.code == "unknown-name"
    assert "write_through" in caught.value.expected
