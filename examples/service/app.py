"""Serve a package by HTTP, with FastAPI: batches of requests, new weights while it runs, metrics.

    python examples/service/app.py model.pt2     # writes the package if there is none, serves it
    curl localhost:8000/predict -H 'content-type: application/json' -d '{"features": [1, 2, 3, 4]}'
    {"score":0.2310}

A request with a wrong number of features gets status 400 and the message of the package:

    {"detail":"input 'input': dimension 1 is 3, but the model takes 4."}
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import scorer
import torch
from batcher import Batcher
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import inductor_ext
from inductor_ext import exc


class Request(BaseModel):
    features: list[float]


def make_app(path: str) -> FastAPI:
    """Return an application that serves the package `path`."""
    model = inductor_ext.load(path)
    batcher = Batcher(model, scorer.LARGEST_BATCH, wait=0.002)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, float]:
        try:
            if len(request.features) != 4:  # It must not fail the batch of other requests.
                model(torch.tensor([request.features]))
            return {"score": await batcher(request.features)}
        except exc.InputMismatchError as error:
            raise HTTPException(400, str(error)) from None

    @app.post("/weights")
    async def weights(file: str) -> dict[str, int]:
        """Use a `state_dict` file from the next batch on. No batch uses old and new weights."""
        state = torch.load(file)
        model.update_constants(state, inactive=True)
        model.fold_constants(inactive=True)
        model.swap_constants()
        return {"replaced": len(state)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> dict[str, int]:
        return {"samples": batcher.samples, "batches": batcher.batches}

    return app


if __name__ == "__main__":
    import uvicorn

    if not os.path.exists(sys.argv[1]):
        scorer.write_package(sys.argv[1])
    uvicorn.run(make_app(sys.argv[1]))
