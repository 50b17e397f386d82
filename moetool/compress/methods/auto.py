"""The best that a budget of bytes can buy: a base or none, rotated inputs or not, bits and ranks.

Every form of every matrix is measured on every footing, in one pass; then each group of matrices gets the footing, and
each matrix the form, with which all lose least together. Whether a base earns its bytes is thereby measured and not
assumed: experts that were upcycled from one network have one in common, experts that were trained as such mostly do not
(arXiv:2606.03465).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from moetool.checkpoint.files import write_text
from moetool.checkpoint.sizes import ByteSize, format_bytes
from moetool.compress.choices import Merge
from moetool.compress.encoding import BaseBits
from moetool.compress.factors.ranking import check_ratio
from moetool.compress.mixing.choosing import Choosing, FormLosses, Mix
from moetool.compress.mixing.footings import Footing, average_bits, on_base, without_base
from moetool.compress.mixing.mixing import Mixing
from moetool.compress.mixing.options import MixingOptions
from moetool.compress.mixing.recipe import read_recipe, recipe_text
from moetool.compress.told import AutoTold
from moetool.errors import UsageError
from moetool.job.job import Job
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.stage import Stage
from moetool.job.writing import original_bytes
