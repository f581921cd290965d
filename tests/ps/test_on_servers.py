"""All tests on two real Ray servers: in one file, so that Ray and the servers start once.

pytest-xdist gives a file to one worker, and a start of Ray with two servers takes 11 seconds of the CPU. Each
test has tables of its own. The tests of `modes_tests` come last: they kill the servers.
"""

import pytest

for _name in ("shards", "gather", "changes", "modes"):
    pytest.register_assert_rewrite(f"{__package__}.{_name}_tests")

from tests.ps.shards_tests import *  # noqa: E402, F403, I001
from tests.ps.gather_tests import *  # noqa: E402, F403
from tests.ps.changes_tests import *  # noqa: E402, F403
from tests.ps.modes_tests import *  # noqa: E402, F403
