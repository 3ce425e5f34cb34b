//! Prediction as a stage: values are replaced by residuals before they are split into planes, and
//! restored after the planes are merged.

use s4_delta::Residual;
use s4_format::limits::MAX_INPUTS;
use s4_format::{ContextsId, Error, LayoutId, Plan, Result};
use s4_planes::{Kernels, Width};
use s4_predict::{ContextModel, Exponents, Known, Predict, Predicted, Tensor, Updates};

use crate::CpuEngine;
use crate::moments::MomentUse;
use crate::once::{self, PIECE};
use crate::scratch::{sized, width_of};

/// The values of a predictor's input for the chunk being decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputValues<'a> {
    /// These bytes.
    Slice(&'a [u8]),
    /// Those in the destination, where the chunk's own values replace them.
    Destination,
}

/// The prediction of a chunk.
#[derive(Clone, Copy)]
pub(crate) struct Prediction<'a> {
    kernels: Kernels,
    predictor: &'a dyn Predict,
    tensor: Tensor<'a>,
    /// Index of the chunk's first value.
    first: u64,
    residual: Residual,
    width: Width,
    contexts: &'a dyn ContextModel,
    /// The use of the moments, if the plan's inputs after the first are moments.
    moments: Option<MomentUse>,
}

impl CpuEngine {
    /// The prediction of a chunk from value index `first` on, by a plan; `None` if its values are
    /// stored without one.
    ///
    /// # Errors
    /// `Unsupported` for a predictor that this engine does not have; `Corrupt` if the residual does not
    /// belong to a prediction.
    pub(crate) fn prediction<'a>(
        &'a self,
        plan: &Plan,
        tensor: Tensor<'a>,
        first: u64,
    ) -> Result<Option<Prediction<'a>>> {
        let Some(predictor) = self.predictors.get(plan.predictor)? else { return Ok(None) };
        let residual = Residual::from_id(plan.residual).ok_or_else(|| {
            let (residual, predictor) = (plan.residual, plan.predictor);
            Error::corrupt(format!(
                "residual `{residual}` is not valid for predictor `{predictor}`"
            ))
        })?;
        let width = width_of(tensor.dtype.value_width())?;
        let kernels = self.kernels;
        let contexts: &dyn ContextModel = match plan.contexts.require_open()? {
            ContextsId::EXPONENT => &Exponents,
            ContextsId::UPDATE => &Updates,
            _ => predictor.contexts(),
        };
        let moments = MomentUse::of(plan, tensor.side)?;
        Ok(Some(Prediction {
            kernels,
            predictor,
            tensor,
            first,
            residual,
            width,
            contexts,
            moments,
        }))
    }
}

impl Prediction<'_> {
    /// Checks that there are as many inputs as the predictor needs, each of `len` bytes.
    fn check(&self, len: usize, inputs: impl ExactSizeIterator<Item = usize>) -> Result<()> {
        let needed = match self.moments.map(|moments| moments.dtypes()) {
            Some((_, second)) => 2 + usize::from(second.is_some()),
            None => self.predictor.inputs().len(),
        };
        if inputs.len() < needed || inputs.len() > MAX_INPUTS {
            return Err(Error::unsupported("delta without its parent's values"));
        }
        for (i, other) in inputs.enumerate() {
            if other != self.scaled(i, len) {
                let what = format!("difference has {len} bytes, but its parent has {other}");
                return Err(Error::corrupt(what));
            }
        }
        Ok(())
    }

    /// Bytes of an input that belong to `len` bytes of whole values.
    fn scaled(&self, input: usize, len: usize) -> usize {
        match (input, self.moments.map(|moments| moments.dtypes())) {
            (1.., Some((first, second))) => {
                let dtype = if input == 1 { first } else { second.unwrap_or(first) };
                len / self.width.bytes() * dtype.value_width()
            }
            _ => {
                let kind = self.predictor.inputs().get(input);
                len * kind.and_then(|kind| kind.scale()).unwrap_or(1)
            }
        }
    }

    /// Negates residuals where the first moment is positive. `inputs` are those of the same values.
    fn turn(&self, inputs: &[&[u8]], residuals: &mut [u8]) -> Result<()> {
        match (self.residual, self.moments, inputs) {
            (Residual::Descent, Some(MomentUse::Contexts(update)), [_, first, ..]) => {
                update.turn(self.kernels, self.width, residuals, first)
            }
            (Residual::Descent, ..) => Err(Error::corrupt("residual `descent` needs moments")),
            _ => Ok(()),
        }
    }

    /// The part of each input that belongs to `len` bytes of the chunk from byte `at` on; `there`
    /// is that part of the destination.
    pub(crate) fn parts<'b>(
        &self,
        inputs: &[InputValues<'b>],
        at: usize,
        there: &'b [u8],
        len: usize,
    ) -> [&'b [u8]; MAX_INPUTS] {
        std::array::from_fn(|i| {
            let (at, len) = (self.scaled(i, at), self.scaled(i, len));
            inputs.get(i).map_or(&[][..], |input| input.part(at, there, len))
        })
    }

    /// Writes the residuals of `src` into `to`, which is as long. Returns the CRC-32C of the
    /// values, which may change meanwhile.
    pub(crate) fn residuals(
        &self,
        src: &[u8],
        inputs: &[&[u8]],
        room: &mut Vec<u8>,
        to: &mut [u8],
    ) -> Result<u32> {
        self.check(src.len(), inputs.iter().map(|input| input.len()))?;
        let room = sized(room, PIECE);
        once::copy_summed(src, to, |at, piece| {
            let (mut parts, len) = ([&[][..]; MAX_INPUTS], piece.len());
            for (i, (part, all)) in parts.iter_mut().zip(inputs).enumerate() {
                *part = &all[self.scaled(i, at)..self.scaled(i, at + len)];
            }
            let parts = &parts[..inputs.len()];
            let predicted = match self.predict(at, parts, &mut room[..len])? {
                Predicted::Input(i) => parts[i],
                Predicted::Written => &room[..len],
            };
            self.residual.diff(self.kernels, self.width, predicted, piece)?;
            self.turn(parts, piece)
        })
    }

    /// Checks the inputs for decoding `len` bytes.
    ///
    /// # Errors
    /// `Unsupported` if there are too few, `Corrupt` if one is of another length.
    pub(crate) fn check_inputs(&self, len: usize, inputs: &[InputValues<'_>]) -> Result<()> {
        self.check(len, inputs.iter().map(|input| input.len(len)))
    }

    /// Undoes [`Prediction::residuals`]: turns the residuals in `values` into values. No input may
    /// lie there, and all must have been checked.
    pub(crate) fn restore(
        &self,
        inputs: &[InputValues<'_>],
        room: &mut Vec<u8>,
        values: &mut [u8],
    ) -> Result<()> {
        let room = sized(room, PIECE);
        for (i, piece) in values.chunks_mut(PIECE).enumerate() {
            let (at, len) = (i * PIECE, piece.len());
            let parts = &self.parts(inputs, at, &[], len)[..inputs.len()];
            self.turn(parts, piece)?;
            let predicted = match self.predict(at, parts, &mut room[..len])? {
                Predicted::Input(i) => parts[i],
                Predicted::Written => &room[..len],
            };
            self.residual.apply(self.kernels, self.width, predicted, piece)?;
        }
        Ok(())
    }

    /// As [`Prediction::restore`], where an input lies in `values` and the chunk's own values
    /// replace it. `residuals`, as long as `values`, is overwritten.
    pub(crate) fn restore_over(
        &self,
        inputs: &[InputValues<'_>],
        room: &mut Vec<u8>,
        residuals: &mut [u8],
        values: &mut [u8],
    ) -> Result<()> {
        let room = sized(room, PIECE);
        let pieces = residuals.chunks_mut(PIECE).zip(values.chunks_mut(PIECE));
        for (i, (residuals, values)) in pieces.enumerate() {
            let (at, len) = (i * PIECE, values.len());
            let before = self.parts(inputs, at, values, len);
            self.turn(&before[..inputs.len()], residuals)?;
            let predicted = self.predict(at, &before[..inputs.len()], &mut room[..len])?;
            let (kernels, width) = (self.kernels, self.width);
            match predicted {
                // XOR is symmetric: the residuals can be applied to the parent in place.
                Predicted::Input(i)
                    if inputs[i].is_destination() && self.residual == Residual::Xor =>
                {
                    self.residual.apply(kernels, width, residuals, values)?;
                    continue;
                }
                Predicted::Input(i) => {
                    let parent = inputs[i].part(at, values, len);
                    self.residual.apply(kernels, width, parent, residuals)?;
                }
                Predicted::Written => {
                    self.residual.apply(kernels, width, &room[..len], residuals)?;
                }
            }
            values.copy_from_slice(residuals);
        }
        Ok(())
    }

    /// Whether the planes of residuals are expected to be sparse.
    pub(crate) fn is_sparse(&self) -> bool {
        self.predictor.is_sparse()
    }

    /// Whether contexts are derived from moments.
    pub(crate) fn has_update_contexts(&self) -> bool {
        matches!(self.moments, Some(MomentUse::Contexts(_)))
    }

    /// Whether the symbols of a plane are coded with several tables.
    pub(crate) fn has_contexts(&self, layout: LayoutId, plane: usize) -> bool {
        self.contexts.tables(layout, plane) > 1
    }

    /// Writes to `to` the context of each of the `len` symbols of the plane after `planes`. On entry `to` is empty or
    /// holds the contexts of an earlier plane of the same chunk, which are kept if they do not depend on planes.
    pub(crate) fn contexts(
        &self,
        layout: LayoutId,
        planes: &[&[u8]],
        inputs: &[&[u8]],
        len: usize,
        to: &mut Vec<u8>,
    ) -> Result<()> {
        if self.contexts.depends_on_planes() || to.len() != len {
            to.clear();
            to.resize(len, 0);
            let Self { kernels, tensor, first, contexts, .. } = *self;
            let known = Known { kernels, tensor, first, layout, planes, inputs };
            contexts.contexts(&known, to)?;
        }
        Ok(())
    }

    /// Predicts the chunk's values from byte `at` on.
    fn predict(&self, at: usize, inputs: &[&[u8]], out: &mut [u8]) -> Result<Predicted> {
        let first = self.first + (at / self.width.bytes()) as u64;
        let predicted = self.predictor.predict(self.kernels, &self.tensor, first, inputs, out)?;
        match predicted {
            Predicted::Input(i) if i >= inputs.len() => {
                let id = self.predictor.id();
                Err(Error::unsupported(format!(
                    "predictor `{id}` refers to input {i}, which does not exist"
                )))
            }
            known => Ok(known),
        }
    }
}

impl<'a> InputValues<'a> {
    pub(crate) fn is_destination(&self) -> bool {
        matches!(self, Self::Destination)
    }

    /// Its length in bytes, for a chunk of `len` bytes.
    fn len(&self, len: usize) -> usize {
        match self {
            Self::Slice(values) => values.len(),
            Self::Destination => len,
        }
    }

    /// `len` of its bytes from byte `at` on; `there` is that part of the destination.
    fn part<'b>(&self, at: usize, there: &'b [u8], len: usize) -> &'b [u8]
    where
        'a: 'b,
    {
        match self {
            Self::Slice(values) => &values[at..at + len],
            Self::Destination => there,
        }
    }
}
