"""Files of the Hugging Face hub, from the local cache or the network."""

import re
from collections.abc import Sequence
from pathlib import Path

from kvjax.errors import UserError

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def fetch(hub_id: str, patterns: Sequence[str], expected: str) -> Path:
    """Return a folder with the files of a hub repository that match the patterns. They are downloaded if they are not
    in the local cache.

    Args:
        expected: what to pass without a network, for the message.

    Raises:
        UserError: the repository cannot be fetched.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns)))
    except errors.GatedRepoError:
        why = "the hub lets only accepted and logged-in users have it"
    except errors.RepositoryNotFoundError:
        why = "the hub has no such repository, or it is private"
    except errors.HfHubHTTPError as error:
        why = f"the hub answered: {str(error).splitlines()[0]}"
    # no network, and not in the local cache either
    except (OSError, errors.OfflineModeIsEnabled, errors.HFValidationError):
        why = "the hub cannot be reached"
    raise UserError(
        f"{hub_id}: no such folder here, and as a Hugging Face hub id it could not be fetched ({why}); without a "
        f"network, pass {expected}"
    )
