//! Plans: how a tensor is predicted, subtracted and split.

use serde::{Deserialize, Deserializer, Serialize};

use crate::bounded;
use crate::digest::Digest;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::id::{ContextsId, LayoutId, PredictorId, ResidualId};
use crate::limits::MAX_DEPENDENCY_DEPTH;

/// A tensor, or a region of it, that a prediction is made from.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// Hash of the manifest of the checkpoint that holds it; absent: this checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "not_null")]
    pub manifest: Option<Digest>,
    /// Index of the tensor in that checkpoint's tensor table.
    pub tensor: u32,
    /// First and end index in each dimension; absent: the whole tensor.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "bounded::region"
    )]
    pub region: Option<Vec<[u64; 2]>>,
}

/// A member that may be absent, but not `null`.
fn not_null<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Digest>, D::Error> {
    Digest::deserialize(d).map(Some)
}

/// Predictor, residual and layout of a tensor. The codec of each stream is in the header of each chunk.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The prediction of the elements.
    pub predictor: PredictorId,
    /// The form of the difference from the prediction.
    pub residual: ResidualId,
    /// The planes that the result is split into.
    pub layout: LayoutId,
    /// The inputs of the prediction.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "bounded::inputs")]
    pub inputs: Vec<Input>,
    /// The rule that selects, among a stream's tables, the one that a symbol is coded with.
    #[serde(default, skip_serializing_if = "ContextsId::is_none")]
    pub contexts: ContextsId,
}

/// Patterns for an input that is a whole tensor: of another checkpoint, and of the same one.
macro_rules! other {
    () => {
        Input { manifest: Some(_), region: None, .. }
    };
}
macro_rules! own {
    () => {
        Input { manifest: None, region: None, .. }
    };
}

impl Plan {
    /// A plan without prediction.
    pub fn direct(layout: LayoutId) -> Self {
        Self::alone(PredictorId::NONE, ResidualId::ID, layout)
    }

    /// The plan of a matrix that is predicted by its rows and columns.
    pub fn rank1(layout: LayoutId) -> Self {
        Self::alone(PredictorId::RANK1, ResidualId::MAGNITUDE, layout)
    }

    /// A plan without inputs.
    fn alone(predictor: PredictorId, residual: ResidualId, layout: LayoutId) -> Self {
        let (inputs, contexts) = (vec![], ContextsId::NONE);
        Self { predictor, residual, layout, inputs, contexts }
    }

    /// The plan of a tensor that is stored as its XOR with the tensor at index `tensor` of the
    /// checkpoint whose manifest has the hash `manifest`.
    pub fn delta(layout: LayoutId, manifest: Digest, tensor: u32) -> Self {
        Self {
            predictor: PredictorId::PARENT,
            residual: ResidualId::XOR,
            layout,
            inputs: vec![Input { manifest: Some(manifest), tensor, region: None }],
            contexts: ContextsId::NONE,
        }
    }

    /// The plan of a matrix that is predicted by its rows and columns, and by the tensor at index
    /// `tensor` of the checkpoint whose manifest has the hash `manifest`.
    pub fn blend(layout: LayoutId, manifest: Digest, tensor: u32) -> Self {
        let (predictor, residual) = (PredictorId::BLEND, ResidualId::MAGNITUDE);
        Self { predictor, residual, ..Self::delta(layout, manifest, tensor) }
    }

    /// The plan of a tensor that is predicted as the rounded copy of the tensor at index `tensor`
    /// of the same checkpoint.
    pub fn cast(layout: LayoutId, tensor: u32) -> Self {
        let inputs = vec![Input { manifest: None, tensor, region: None }];
        Self { inputs, ..Self::alone(PredictorId::CAST, ResidualId::XOR, layout) }
    }

    /// The plan of a tensor whose values are those of the tensor at index `tensor` of the same
    /// checkpoint.
    pub fn same(layout: LayoutId, tensor: u32) -> Self {
        Self { predictor: PredictorId::SAME, ..Self::cast(layout, tensor) }
    }

    /// The plan of a tensor that is stored as its difference from the tensor at index `tensor` of
    /// the checkpoint whose manifest has the hash `manifest`, with contexts from its moments.
    /// `moments` are the indices of the first moment in the same checkpoint and, if the optimizer has one, of the
    /// second.
    pub fn update(manifest: Digest, tensor: u32, moments: &[u32]) -> Self {
        let plan = Self::with_moments(LayoutId::BYTES, manifest, tensor, moments);
        Self { residual: ResidualId::DESCENT, contexts: ContextsId::UPDATE, ..plan }
    }

    /// The plan of a tensor that is predicted by taking the optimizer's step from the tensor at index `tensor` of the
    /// checkpoint whose manifest has the hash `manifest`. `moments` are the indices of the first moment in the same
    /// checkpoint and, if the optimizer has one, of the second.
    pub fn step(layout: LayoutId, manifest: Digest, tensor: u32, moments: &[u32]) -> Self {
        let plan = Self::with_moments(layout, manifest, tensor, moments);
        Self { predictor: PredictorId::STEP, residual: ResidualId::SUB, ..plan }
    }

    fn with_moments(layout: LayoutId, manifest: Digest, tensor: u32, moments: &[u32]) -> Self {
        let mut plan = Self::delta(layout, manifest, tensor);
        let input = |&tensor| Input { manifest: None, tensor, region: None };
        plan.inputs.extend(moments.iter().map(input));
        plan
    }

    /// The index of the tensor of the same checkpoint that the plan predicts from, if there is one.
    pub fn own_input(&self) -> Option<u32> {
        let input = self.inputs.first().filter(|input| input.manifest.is_none())?;
        Some(input.tensor)
    }

    /// The dtype that the tensor of [`Plan::own_input`] must have for the values of a tensor of `dtype` to be copies of its
    /// values; `None` if the plan does not copy another tensor's values, or not to this dtype.
    pub fn copied_dtype(&self, dtype: DType) -> Option<DType> {
        match self.predictor {
            PredictorId::SAME => Some(dtype),
            PredictorId::CAST => (dtype.value_width() == 2).then_some(DType::Float32),
            _ => None,
        }
    }

    /// Bytes of the first input for each byte of the tensor; 0 if there is no input.
    pub fn input_scale(&self) -> u64 {
        match self.predictor {
            PredictorId::PARENT | PredictorId::BLEND | PredictorId::STEP | PredictorId::SAME => 1,
            PredictorId::CAST => 2,
            _ => 0,
        }
    }

    /// Whether values are predicted from offsets of rows and columns.
    pub fn has_offsets(&self) -> bool {
        matches!(self.predictor, PredictorId::RANK1 | PredictorId::BLEND)
    }

    /// The tensors of the same checkpoint that predictor `step` or contexts `update` are computed from: the first
    /// moment, and the second if there is one. Empty for other plans.
    pub fn moments(&self) -> &[Input] {
        match &*self.inputs {
            [_, moments @ ..] if self.has_moments() => moments,
            _ => &[],
        }
    }

    /// Whether its inputs after the parent are moments.
    pub fn has_moments(&self) -> bool {
        self.predictor == PredictorId::STEP || self.contexts == ContextsId::UPDATE
    }

    /// The indices of all tensors of the same checkpoint that are needed to read a tensor with this
    /// plan.
    pub fn own_inputs(&self) -> impl Iterator<Item = u32> {
        self.inputs.iter().filter(|i| i.manifest.is_none()).map(|i| i.tensor)
    }

    /// Whether values are stored without prediction.
    pub fn is_direct(&self) -> bool {
        self.predictor == PredictorId::NONE
    }

    /// Whether values are predicted from the parent's.
    pub fn is_delta(&self) -> bool {
        matches!(self.predictor, PredictorId::PARENT | PredictorId::BLEND | PredictorId::STEP)
    }

    /// The parent's manifest and the index of the tensor in it, if the plan predicts from the
    /// parent.
    pub fn parent(&self) -> Option<(Digest, u32)> {
        let input = self.inputs.first().filter(|_| self.is_delta())?;
        Some((input.manifest?, input.tensor))
    }

    /// Checks that this version can decode the plan.
    ///
    /// # Errors
    /// `Unsupported`, naming the part that is not implemented; `Corrupt` for parts that do not
    /// belong together.
    pub fn require_open(&self) -> Result<()> {
        self.predictor.require_open()?;
        self.residual.require_open()?;
        self.layout.require_open()?;
        self.contexts.require_open()?;
        let from_moments =
            matches!(self.inputs.as_slice(), [other!(), own!()] | [other!(), own!(), own!()]);
        let fits = match self.predictor {
            PredictorId::NONE => self.residual == ResidualId::ID && self.inputs.is_empty(),
            PredictorId::RANK1 => self.residual == ResidualId::MAGNITUDE && self.inputs.is_empty(),
            PredictorId::BLEND => {
                let inputs = matches!(self.inputs.as_slice(), [other!()]);
                inputs && self.residual == ResidualId::MAGNITUDE
            }
            PredictorId::STEP => {
                from_moments && self.residual == ResidualId::SUB && self.contexts.is_none()
            }
            PredictorId::PARENT => match self.residual {
                ResidualId::XOR | ResidualId::SUB => {
                    matches!(self.inputs.as_slice(), [other!()])
                }
                ResidualId::DESCENT => from_moments && self.contexts == ContextsId::UPDATE,
                _ => false,
            },
            PredictorId::CAST | PredictorId::SAME => {
                self.residual == ResidualId::XOR && matches!(self.inputs.as_slice(), [own!()])
            }
            // One that the format names and this list does not.
            _ => false,
        };
        let fits = fits && (self.contexts.is_none() || self.may_have_contexts());
        if fits && (self.layout != LayoutId::TOKEN || self.residual == ResidualId::SUB) {
            return Ok(());
        }
        Err(Error::corrupt(format!(
            "invalid plan: predictor `{}`, residual `{}`, layout `{}`, contexts `{}` and {} inputs",
            self.predictor,
            self.residual,
            self.layout,
            self.contexts,
            self.inputs.len()
        )))
    }

    /// Whether the format defines contexts for such a plan.
    fn may_have_contexts(&self) -> bool {
        let fields = matches!(self.layout, LayoutId::FIELDS | LayoutId::FIELDS_SIGN);
        match (self.residual, self.contexts) {
            (ResidualId::SUB, ContextsId::EXPONENT) => self.is_delta() && fields,
            (ResidualId::DESCENT, ContextsId::UPDATE) => {
                self.is_delta() && self.layout == LayoutId::BYTES
            }
            _ => false,
        }
    }
}

/// Checks that the inputs of the tensors of one checkpoint form no cycle and no path longer than
/// [`MAX_DEPENDENCY_DEPTH`]. `inputs(t)` gives the tensors of the same checkpoint that `t` needs.
///
/// # Errors
/// `Corrupt` for an input out of range, `Limit` for a cycle or too long a path.
pub fn check_dependencies<'a>(tensors: usize, inputs: impl Fn(usize) -> &'a [Input]) -> Result<()> {
    let own =
        |t: usize| inputs(t).iter().filter(|i| i.manifest.is_none()).map(|i| i.tensor as usize);
    let mut depth = vec![0usize; tensors];
    let too_deep = || {
        Error::limit(format!(
            "tensor inputs form a cycle or a path longer than {MAX_DEPENDENCY_DEPTH}"
        ))
    };
    // Depths only grow and are bounded, so this ends; along a cycle they grow past the bound.
    loop {
        let mut changed = false;
        for t in 0..tensors {
            for i in own(t) {
                let below = *depth.get(i).ok_or_else(|| {
                    Error::corrupt(format!("input {i} of tensor {t} is not in the tensor table"))
                })?;
                if below >= MAX_DEPENDENCY_DEPTH {
                    return Err(too_deep());
                }
                if depth[t] < below + 1 {
                    depth[t] = below + 1;
                    changed = true;
                }
            }
        }
        if !changed {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(tensor: u32) -> Vec<Input> {
        vec![Input { manifest: None, tensor, region: None }]
    }

    #[test]
    fn dependencies_are_acyclic_and_bounded() {
        let chain = |n: u32| -> Vec<Vec<Input>> {
            (0..n).map(|i| if i == 0 { vec![] } else { on(i - 1) }).collect()
        };
        let check = |g: &[Vec<Input>]| check_dependencies(g.len(), |t| &g[t]);
        assert!(check(&chain(5)).is_ok());
        let mut reversed = chain(5);
        reversed.reverse();
        for (i, inputs) in reversed.iter_mut().enumerate() {
            if i < 4 {
                *inputs = on(u32::try_from(i).unwrap() + 1);
            }
        }
        assert!(check(&reversed).is_ok());
        assert!(matches!(check(&chain(6)), Err(Error::Limit { .. })));
        assert!(matches!(check(&[on(1), on(0)]), Err(Error::Limit { .. })));
        assert!(matches!(check(&[on(0)]), Err(Error::Limit { .. })));
        assert!(matches!(check(&[on(7)]), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn plans_are_refused_by_name() {
        let mut p = Plan::direct(LayoutId::FIELDS);
        assert!(p.require_open().is_ok());
        p.predictor = PredictorId(99);
        assert!(p.require_open().unwrap_err().to_string().contains("predictor id 99"));
        p = Plan::direct(LayoutId::TOKEN);
        assert!(matches!(p.require_open(), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn each_predictor_has_its_residuals() {
        let listed = [
            (PredictorId::NONE, vec![ResidualId::ID]),
            (PredictorId::PARENT, vec![ResidualId::XOR, ResidualId::SUB, ResidualId::DESCENT]),
            (PredictorId::SAME, vec![ResidualId::XOR]),
            (PredictorId::CAST, vec![ResidualId::XOR]),
            (PredictorId::RANK1, vec![ResidualId::MAGNITUDE]),
            (PredictorId::BLEND, vec![ResidualId::MAGNITUDE]),
            (PredictorId::STEP, vec![ResidualId::SUB]),
        ];
        let parent = Input { manifest: Some(Digest::of(b"parent")), tensor: 7, region: None };
        let update = [vec![parent.clone()], on(3)].concat();
        let inputs = [vec![], on(3), vec![parent], update];
        let fits = |predictor, residual| {
            inputs.iter().any(|inputs| {
                ContextsId::ALL.iter().any(|&contexts| {
                    let inputs = inputs.clone();
                    let layout = LayoutId::BYTES;
                    let direct = Plan::direct(layout);
                    let plan = Plan { predictor, residual, contexts, inputs, ..direct };
                    let answer = plan.require_open();
                    assert!(matches!(answer, Ok(()) | Err(Error::Corrupt { .. })), "{answer:?}");
                    answer.is_ok()
                })
            })
        };
        let fitting = |&predictor: &PredictorId| {
            let residuals = ResidualId::ALL.iter().copied().filter(|&r| fits(predictor, r));
            (predictor, residuals.collect::<Vec<_>>())
        };
        assert_eq!(PredictorId::ALL.iter().map(fitting).collect::<Vec<_>>(), listed);
    }

    #[test]
    fn deltas_have_one_whole_input_of_another_checkpoint() {
        let parent = Digest::of(b"parent");
        let delta = Plan::delta(LayoutId::FIELDS, parent, 7);
        assert!(delta.require_open().is_ok());
        assert_eq!(delta.parent(), Some((parent, 7)));
        assert!(delta.is_delta() && !delta.is_direct());
        assert!(Plan::direct(LayoutId::FIELDS).is_direct());
        assert_eq!(Plan::direct(LayoutId::FIELDS).parent(), None);
        let refused = |change: fn(&mut Plan)| {
            let mut p = Plan::delta(LayoutId::FIELDS, Digest::of(b"parent"), 7);
            change(&mut p);
            let e = p.require_open().unwrap_err();
            assert!(matches!(e, Error::Corrupt { .. }), "{e}");
        };
        refused(|p| p.inputs.clear());
        refused(|p| p.inputs.push(p.inputs[0].clone()));
        refused(|p| p.inputs[0].manifest = None);
        refused(|p| p.inputs[0].region = Some(vec![[0, 1]]));
        refused(|p| p.residual = ResidualId::ID);
        refused(|p| p.predictor = PredictorId::NONE);
        refused(|p| p.predictor = PredictorId::RANK1);
        refused(|p| p.layout = LayoutId::TOKEN);
        let mut ordered = delta;
        ordered.residual = ResidualId::SUB;
        assert!(ordered.require_open().is_ok());
        ordered.layout = LayoutId::TOKEN;
        assert!(ordered.require_open().is_ok());
    }

    #[test]
    fn updates_have_a_parent_and_one_moment_or_two() {
        let with = |moments: &[u32]| Plan::update(Digest::of(b"parent"), 7, moments);
        assert!(with(&[3]).require_open().is_ok());
        assert_eq!(with(&[3]).own_inputs().collect::<Vec<_>>(), [3]);
        let update = || with(&[3, 4]);
        assert!(update().require_open().is_ok());
        assert_eq!(update().parent(), Some((Digest::of(b"parent"), 7)));
        assert!(update().has_moments() && update().own_input().is_none());
        assert_eq!(update().own_inputs().collect::<Vec<_>>(), [3, 4]);
        let refused: [fn(&mut Plan); 10] = [
            |p| p.inputs.truncate(1),
            |p| p.inputs.push(p.inputs[1].clone()),
            |p| p.inputs.swap(0, 1),
            |p| p.inputs[2].manifest = p.inputs[0].manifest,
            |p| p.inputs[1].region = Some(vec![[0, 1]]),
            |p| p.residual = ResidualId::SUB,
            |p| p.contexts = ContextsId::NONE,
            |p| p.contexts = ContextsId::EXPONENT,
            |p| p.layout = LayoutId::FIELDS,
            |p| p.predictor = PredictorId::CAST,
        ];
        for (i, change) in refused.into_iter().enumerate() {
            let mut plan = update();
            change(&mut plan);
            assert!(matches!(plan.require_open(), Err(Error::Corrupt { .. })), "{i}: {plan:?}");
        }
    }

    #[test]
    fn steps_have_a_parent_and_one_moment_or_two() {
        let with = |moments: &[u32]| {
            let step = Plan::step(LayoutId::BYTES, Digest::of(b"parent"), 7, moments);
            assert_eq!(step.moments().iter().map(|i| i.tensor).collect::<Vec<_>>(), moments);
            step
        };
        for moments in [&[3][..], &[3, 4]] {
            assert!(with(moments).require_open().is_ok() && with(moments).is_delta());
            assert_eq!(with(moments).parent(), Some((Digest::of(b"parent"), 7)));
            assert_eq!(with(moments).own_input(), None);
        }
        let step = || with(&[3, 4]);
        for layout in [LayoutId::FIELDS, LayoutId::FIELDS_SIGN, LayoutId::WHOLE, LayoutId::TOKEN] {
            assert!(Plan { layout, ..step() }.require_open().is_ok());
        }
        let refused: [fn(&mut Plan); 9] = [
            |p| p.inputs.truncate(1),
            |p| p.inputs.push(p.inputs[1].clone()),
            |p| p.inputs.swap(0, 1),
            |p| p.inputs[2].manifest = p.inputs[0].manifest,
            |p| p.inputs[1].region = Some(vec![[0, 1]]),
            |p| p.residual = ResidualId::XOR,
            |p| p.residual = ResidualId::DESCENT,
            |p| p.contexts = ContextsId::EXPONENT,
            |p| p.predictor = PredictorId::BLEND,
        ];
        for (i, change) in refused.into_iter().enumerate() {
            let mut plan = step();
            change(&mut plan);
            assert!(matches!(plan.require_open(), Err(Error::Corrupt { .. })), "{i}: {plan:?}");
        }
    }
}
