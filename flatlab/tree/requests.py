"""Requests to the model beside the episodes: for strategies, for a decision, for a note."""

from __future__ import annotations

import contextlib
import math

from flatlab.tree.nodes import Tree, seed_from

LEAST_ROOM = 32  # tokens: a request whose reply would have less room is not sent


async def chat(t: Tree, account, talk: list, request: str, *purpose, limit=None) -> str:
    """Asks for a reply of at most `limit` tokens; "" if the prompt leaves no room for one.

    account: the node or choice whose token count grows. talk: the messages before the request;
    request and reply are appended. purpose: what the seed is made of.
    """
    talk.append({"role": "user", "content": request})
    prompt = t.policy.render(talk)
    most = t.cfg.episode.max_reply_tokens
    room = min(limit or math.inf, most, t.cfg.model.context - len(prompt))
    reply = ""
    if room >= LEAST_ROOM:
        seed = seed_from(t.seed, *purpose)
        with contextlib.suppress(OverflowError):  # by the count of an endpoint
            sample = await CountingPolicy(t.policy, account).sample(prompt, room, seed=seed)
            reply = sample.text
    talk.append({"role": "assistant", "content": reply})
    return reply


class CountingPolicy:
    """The policy as a node or a choice uses it: its token count grows while it still runs."""

    def __init__(self, policy, account):
        self.policy = policy
        self.account = account

    def __getattr__(self, name):
        return getattr(self.policy, name)

    async def sample(self, *args, **kwargs):
        sample = await self.policy.sample(*args, **kwargs)
        # an endpoint counts the tokens of a reply itself
        self.account.tokens += getattr(sample, "reply_tokens", len(sample.tokens))
        return sample
