"""Megalith: recommender models whose embedding tables grow with the data.

The names are imported when they are first used, so that `megalith --help` does not wait for torch.
"""

from typing import TYPE_CHECKING

from megalith.lazy import lazy_names

__version__ = "0.2.0"

if TYPE_CHECKING:
    from megalith import checkpoint as checkpoint
    from megalith.errors import MegalithError as MegalithError
    from megalith.hashing import hash_strings as hash_strings
    from megalith.nn import EmbeddingCollection as EmbeddingCollection
    from megalith.nn import Feature as Feature
    from megalith.nn import FirstN as FirstN
    from megalith.nn import Layout as Layout
    from megalith.nn import Mean as Mean
    from megalith.nn import Pipeline as Pipeline
    from megalith.nn import Slice as Slice
    from megalith.nn import Sqrtn as Sqrtn
    from megalith.nn import Sum as Sum
    from megalith.ops.ids import fid as fid
    from megalith.ps import Servers as Servers
    from megalith.ps import ServerShards as ServerShards
    from megalith.ragged import Ragged as Ragged
    from megalith.routing import Router as Router
    from megalith.shards import LocalShards as LocalShards
    from megalith.shards import Lookup as Lookup
    from megalith.shards import Shards as Shards
    from megalith.shards import SyncShards as SyncShards
    from megalith.table import FTRL as FTRL
    from megalith.table import LAMB as LAMB
    from megalith.table import SGD as SGD
    from megalith.table import TTL as TTL
    from megalith.table import Adadelta as Adadelta
    from megalith.table import Adagrad as Adagrad
    from megalith.table import Adam as Adam
    from megalith.table import AdamW as AdamW
    from megalith.table import AMSGrad as AMSGrad
    from megalith.table import BatchSoftmax as BatchSoftmax
    from megalith.table import Capacity as Capacity
    from megalith.table import Constant as Constant
    from megalith.table import DelayCompensated as DelayCompensated
    from megalith.table import DynamicWdAdagrad as DynamicWdAdagrad
    from megalith.table import FixedPoint as FixedPoint
    from megalith.table import GroupAdagrad as GroupAdagrad
    from megalith.table import GroupFTRL as GroupFTRL
    from megalith.table import Initializer as Initializer
    from megalith.table import Lion as Lion
    from megalith.table import MinCount as MinCount
    from megalith.table import MinNorm as MinNorm
    from megalith.table import Momentum as Momentum
    from megalith.table import MovingAverage as MovingAverage
    from megalith.table import Normal as Normal
    from megalith.table import OneBit as OneBit
    from megalith.table import Ones as Ones
    from megalith.table import Optimizer as Optimizer
    from megalith.table import Piecewise as Piecewise
    from megalith.table import PolynomialDecay as PolynomialDecay
    from megalith.table import Probability as Probability
    from megalith.table import RMSProp as RMSProp
    from megalith.table import RMSPropV2 as RMSPropV2
    from megalith.table import RowWiseAdagrad as RowWiseAdagrad
    from megalith.table import Segment as Segment
    from megalith.table import Table as Table
    from megalith.table import TableConfig as TableConfig
    from megalith.table import TableLR as TableLR
    from megalith.table import TruncatedNormal as TruncatedNormal
    from megalith.table import Uniform as Uniform
    from megalith.table import Warmup as Warmup
    from megalith.table import Zeros as Zeros
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            ".": "checkpoint",
            ".errors": "MegalithError",
            ".hashing": "hash_strings",
            ".nn": "EmbeddingCollection Feature FirstN Layout Mean Pipeline Slice Sqrtn Sum",
            ".ops.ids": "fid",
            ".ps": "ServerShards Servers",
            ".ragged": "Ragged",
            ".routing": "Router",
            ".shards": "LocalShards Lookup Shards SyncShards",
            ".table": "FTRL LAMB SGD TTL AMSGrad Adadelta Adagrad Adam AdamW BatchSoftmax Capacity"
            " Constant DelayCompensated DynamicWdAdagrad FixedPoint GroupAdagrad GroupFTRL"
            " Initializer Lion MinCount MinNorm Momentum MovingAverage Normal OneBit Ones"
            " Optimizer Piecewise PolynomialDecay Probability RMSProp RMSPropV2 RowWiseAdagrad"
            " Segment Table TableConfig TableLR TruncatedNormal Uniform Warmup Zeros",
        },
    )
