//! Plans tensors, possibly on a thread other than the writer's.

use std::sync::Arc;

use rayon::ThreadPool;
#[cfg(feature = "cuda")]
use s4_engine::cuda::CudaEngine;
use s4_engine::{CpuEngine, Engine, Preset, TensorPlan};

use crate::alike::Alike;
use crate::batch::Batch;
use crate::error::Result;
use crate::inputs::{Failure, ParentInputs, Place};
use crate::options::CodingFn;
use crate::parallel::Pools;
use crate::parent::Parent;
use crate::recall::Recall;

/// The inputs of planning, besides the tensors.
pub(crate) struct Planner {
    /// Names the output in errors.
    pub(crate) target: String,
    pub(crate) preset: Preset,
    pub(crate) cpu: Arc<CpuEngine>,
    #[cfg(feature = "cuda")]
    pub(crate) devices: Option<Arc<CudaEngine>>,
    pub(crate) parent: Option<Arc<dyn Parent>>,
    /// Choices for the same tensors in earlier checkpoints, which are tried first.
    pub(crate) recall: Option<Arc<Recall>>,
    /// Choices for similar tensors of this checkpoint.
    pub(crate) alike: Arc<Alike>,
    /// Changes the codings of planes.
    pub(crate) choose: Option<CodingFn>,
}

/// Tensors and their plans.
pub(crate) struct Planned<'a> {
    pub(crate) batch: Batch<'a>,
    pub(crate) plans: Vec<TensorPlan>,
    /// Where to find the values that they are predicted from.
    pub(crate) places: Vec<Option<Place<'a>>>,
}

impl Planner {
    /// Plans tensors. The records of their moments are not looked at.
    pub(crate) fn plan<'a>(&'a self, batch: Batch<'a>, pools: &Pools) -> Result<Planned<'a>> {
        let pool = pools.of(batch.is_on_device());
        #[cfg(test)]
        crate::roles::tests::planned(&batch);
        #[cfg(feature = "cuda")]
        let planned = match self.devices.as_deref().filter(|_| batch.is_on_device()) {
            Some(engine) => self.plan_by(engine, &batch, pool),
            None => self.plan_by(&*self.cpu, &batch, pool),
        };
        #[cfg(not(feature = "cuda"))]
        let planned = self.plan_by(&*self.cpu, &batch, pool);
        match planned {
            Ok((plans, places)) => Ok(Planned { batch, plans, places }),
            Err(e) => Err(e.named(&self.target, |i| batch.names.get(i).copied())),
        }
    }

    fn plan_by<G: Engine>(
        &self,
        engine: &G,
        batch: &Batch<'_>,
        pool: Option<&ThreadPool>,
    ) -> Result<(Vec<TensorPlan>, Vec<Option<Place<'_>>>), Failure>
    where
        Failure: From<G::Error>,
    {
        let (parent, recall) = (self.parent.as_deref(), self.recall.as_deref());
        let Batch { names, tensors, parents, .. } = batch;
        if let Some(parent) = parent.filter(|_| batch.is_on_device()) {
            Place::prepare(parent, parents.iter().copied().flatten())?;
        }
        let chosen = |(name, parent): (&&str, &Option<u32>)| recall?.choice(name, parent.is_some());
        let known: Vec<_> = names.iter().zip(parents).map(chosen).collect();
        let mut left: Vec<_> = (0..tensors.len()).collect();
        let mut plans: Vec<(usize, TensorPlan)> = vec![];
        while !left.is_empty() {
            let round = self.alike.round(batch, &known, &mut left);
            let Batch { names, tensors, parents, moments, .. } = &batch.only(&round.tensors);
            let inputs = ParentInputs::new(parent, pool, tensors, parents).with_moments(moments);
            let mut inputs = inputs.with_choices(&round.choices);
            if let Some(recall) = recall {
                inputs = inputs.with_recall(recall, names);
            }
            let planned = engine.plan(self.preset, tensors, &inputs, pool);
            let planned = planned.map_err(|e: Failure| e.among(&round.tensors))?;
            if let Some(recall) = recall {
                let chosen = names.iter().zip(parents).zip(&planned);
                recall.note(
                    chosen.map(|((name, parent), plan)| (*name, parent.is_some(), plan.choice)),
                );
            }
            let numbers = round.tensors.clone();
            self.alike.note(round, &planned);
            plans.extend(numbers.into_iter().zip(planned));
        }
        plans.sort_unstable_by_key(|(number, _)| *number);
        let mut plans: Vec<_> = plans.into_iter().map(|(_, plan)| plan).collect();
        if let Some(choose) = &self.choose {
            batch.tensors.iter().zip(&mut plans).for_each(|(tensor, plan)| choose(tensor, plan));
        }
        let places = Place::find(parent, &plans, batch.is_on_device(), pool)?;
        Ok((plans, places))
    }
}
