import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests share tiny.py


@pytest.fixture
def tokens():
    import torch

    return torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(7))
