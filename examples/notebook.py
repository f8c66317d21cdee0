"""From Python: load a model, ask it, score an answer, train it, export what came out.

    python examples/notebook.py [key=value ...]

The settings are those of the training, such as training.max_steps=5.
"""

import sys
import time
from pathlib import Path

from tunix_lite.api import GenerationConfig, compose, evaluate_model, export, load, train

question = "What is 12 + 7 - 3?"
# or a folder in Hugging Face layout, a name on the hub, the folder of a run
model = load("bundled")
for completion in model.generate(question, GenerationConfig(32, 48), num_generations=2):
    print(completion.text)
print("log p of an answer:", model.score(question, "The answer is 16.")[0].sum())

outputs = Path(f"outputs/notebook/{time.strftime('%Y-%m-%d_%H-%M-%S')}")
settings = compose(["model.lora.rank=8", "optimizer.learning_rate=2e-3", *sys.argv[1:]])
train(settings, outputs)
trained = load(outputs)
print("right:", evaluate_model(trained, settings)["accuracy"])
print("".join(trained.stream(question, GenerationConfig(32, 48, temperature=0.0))))
print(export(trained, outputs / "export" / "merged", kind="merged").serve)
