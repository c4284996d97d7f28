"""Secrets and control characters are out of what is shown and kept."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

import storage.text
from storage.errors import IngestError, VcalError
from storage.text import cleaned, has_secret, redacted

SECRET = "dGhlLXNlY3JldA%3D%3D"


@pytest.mark.parametrize(
    "text",
    [
        f"https://b.s3.example/a.csv?X-Amz-Algorithm=A&X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}",
        f"https://b.s3.example/a.csv?x-amz-security-token={SECRET}",
        f"https://storage.example/b/a.csv?X-Goog-Signature={SECRET}&part=2",
        f"https://a.blob.example/c/a.csv?sv=2024-01-01&se=2026&sig={SECRET}",
        f"https://host/a.csv?AWSAccessKeyId={SECRET}&Signature={SECRET}&Expires=1",
        f"https://host/a.csv?token={SECRET}",
        f"https://host/a.csv?access_token={SECRET}#part",
        f"https://host/a.csv?api_key={SECRET}",
        f"sftp://me:{SECRET}@host:22/a.csv",
        f"https://:{SECRET}@host/a.csv",
        f"https://me:{SECRET}@x@host/a.csv",  # a password with an @ in it
        f"https://{SECRET}@host/a.csv",
        f"cannot read 'https://me:{SECRET}@host/a.csv': no route",
        f"AWS_SECRET_ACCESS_KEY={SECRET} vcal train",
        f"host=lab password={SECRET}; user=me",
    ],
)
def test_secrets_are_hidden(text: str) -> None:
    assert SECRET not in redacted(text)
    assert has_secret(text)
    assert not has_secret(redacted(text))
    assert SECRET not in str(VcalError(text))
    assert SECRET not in str(IngestError(f"x: {text}; y"))


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/runs/a@b.csv?part=1",
        "ssh://git@host/x",
        "tcp://10.0.0.1:8786",
        "KEY=VALUE",
        "fit.emulator.steps=500 and data.scheduler=tcp://host:1",
        "the token is not shown",
        "keys=3, monkey=4",
        "",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


@given(st.text(st.characters()))
def test_nothing_that_is_shown_commands_a_terminal_or_fails_to_be_encoded(text: str) -> None:
    shown = cleaned(text)
    shown.encode()
    assert all(
        character.isprintable() or character in "\n\t" or ord(character) > 0xFF
        for character in shown
        if character != "\xad" and character != "\xa0"
    )
    assert cleaned(shown) == shown


def test_examples_run() -> None:
    assert doctest.testmod(storage.text).failed == 0
