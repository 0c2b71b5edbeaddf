"""The same training handed over to a trainer: you give it a model, data and settings, it runs the loop.

Run it with `python examples/trainer.py`.
"""

from verses import classifier, datasets

from halfstep import Trainer, TrainingArguments  # stock: from transformers import Trainer, TrainingArguments


def compute_metrics(prediction):
    """The share of the verses that the model labels correctly."""
    logits, labels = prediction
    return {"accuracy": (logits.argmax(axis=-1) == labels).mean()}


def main(train_size=6000, validation_size=2000, batch_size=64, epochs=2, learning_rate=1e-3, output_dir="results"):
    """Train, print how many steps were applied, and return the accuracy on the validation set."""
    train_dataset, validation_dataset = datasets(train_size, validation_size)

    args = TrainingArguments(
        output_dir=output_dir,
        overwrite_output_dir=True,
        evaluation_strategy="epoch",
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        num_train_epochs=epochs,
        learning_rate=learning_rate,
        logging_steps=50,
        fp16=True,
    )
    trainer = Trainer(
        model=classifier(),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=validation_dataset,
        compute_metrics=compute_metrics,
    )
    result = trainer.train()
    print(f"steps: {result.global_step} applied")
    return trainer.evaluate()["eval_accuracy"]


if __name__ == "__main__":
    print(f"validation accuracy: {main():.3f}")
