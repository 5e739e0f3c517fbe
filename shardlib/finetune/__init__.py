"""Fine-tuning of a few parameters: low-rank adapters on any model, and PEFT's format of them.

```python
loaded = sl.hf.load("Llama-3.2-1B")
model = sl.finetune.lora(loaded.model, rank=16, rngs=nnx.Rngs(0))
state = sl.init_state(model, optax.adamw(1e-4), wrt=nnx.LoRAParam)
...
sl.finetune.save_adapter(state, "adapter", base="meta-llama/Llama-3.2-1B")
sl.hf.save(sl.finetune.merge(state), "merged")
```
"""

from shardlib.finetune.lora import Adapted as Adapted
from shardlib.finetune.lora import LoraConfig as LoraConfig
from shardlib.finetune.lora import lora as lora
from shardlib.finetune.lora import merge as merge
from shardlib.finetune.peft import load_adapter as load_adapter
from shardlib.finetune.peft import save_adapter as save_adapter
from shardlib.functional.quantized import quantize as quantize
