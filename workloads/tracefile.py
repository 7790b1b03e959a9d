from workloads.readers import FORMATS, read_trace  # noqa: F401
from workloads.readers.azure import COLUMNS as AZURE_COLUMNS  # noqa: F401

BLOCK_TOKENS = 512
