"""Models in the format of Hugging Face: loaded onto any mesh, and saved from any.

```python
with sl.use(mesh, sl.rules.FSDP):
    loaded = sl.hf.load("Llama-3.2-1B")
    logits = loaded.logits(tokens)
    sl.hf.save(loaded, "exported")
```
"""

from shardlib.hf.architecture import Architecture as Architecture
from shardlib.hf.architecture import Converter as Converter
from shardlib.hf.architecture import Field as Field
from shardlib.hf.architecture import architectures as architectures
from shardlib.hf.description import Description as Description
from shardlib.hf.description import describe as describe
from shardlib.hf.hub import folder_of as folder_of
from shardlib.hf.load import load as load
from shardlib.hf.load import placements as placements
from shardlib.hf.load import read_params as read_params
from shardlib.hf.loaded import Loaded as Loaded
from shardlib.hf.new_folder import refuse_full as refuse_full
from shardlib.hf.save import save as save
from shardlib.hf.tensor_table import TensorRow as TensorRow
from shardlib.hf.tensor_table import rows as rows
