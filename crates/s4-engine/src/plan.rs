//! Plans: the planner makes them, and the encoder carries them out.

use s4_format::side::{Side, SideKind};
use s4_format::{CodecId, Plan, Result};

use crate::planner::Choice;
use crate::tables::SharedTables;

/// The coding of one plane: a bitstream and its parameter. In each chunk, a constant plane is
/// stored as its constant, and one that coding does not make smaller is stored raw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlaneCoding {
    /// The bitstream; the engine must have its codec.
    pub codec: CodecId,
    /// The parameter of the streams.
    pub param: u8,
}

impl PlaneCoding {
    /// Stored as it is: it looks like noise.
    pub const RAW: Self = Self::new(CodecId::RAW, 0);
    /// rANS with `P = 8`.
    pub const RANS8: Self = Self::new(CodecId::RANS, 8);
    /// rANS with `P = 12`.
    pub const RANS12: Self = Self::new(CodecId::RANS, 12);
    /// Dense packing of values below 128.
    pub const BITS7: Self = Self::new(CodecId::BITS, 7);
    /// One Zstandard frame.
    pub const ZSTD: Self = Self::new(CodecId::ZSTD, 0);
    /// GDeflate.
    pub const GDEFLATE: Self = Self::new(CodecId::GDEFLATE, 0);
    /// nvCOMP's ANS, which is closed: an engine from [`crate::CpuEngine::writing`] has it.
    pub const NVCOMP_ANS: Self = Self::new(CodecId::NVCOMP_ANS, 0);

    /// Streams of a codec with a parameter.
    pub const fn new(codec: CodecId, param: u8) -> Self {
        Self { codec, param }
    }
}

/// The planner's decisions for a tensor.
#[derive(Debug, Clone)]
pub struct TensorPlan {
    /// Predictor, residual and layout, as the manifest keeps them.
    pub plan: Plan,
    /// The coding of each plane.
    pub planes: Vec<PlaneCoding>,
    /// Values in each chunk but the last, as a power of two.
    pub chunk_log2: u8,
    /// Side data that the chunks need, except shared tables.
    pub side: Side,
    /// Lets the planner choose faster for the same tensor of a later checkpoint.
    pub choice: Option<Choice>,
    /// Bit mask of the planes whose symbols all use one table, whatever their contexts.
    pub(crate) one_table: u8,
    /// For each plane, the tables that all chunks may share, as the side data stores them; empty if
    /// there are none.
    pub(crate) shared: Vec<Vec<u8>>,
}

impl TensorPlan {
    /// A plan that was not made by the planner, without side data or shared tables.
    pub fn new(plan: Plan, planes: Vec<PlaneCoding>, chunk_log2: u8) -> Self {
        Self {
            plan,
            planes,
            chunk_log2,
            side: Side::default(),
            one_table: 0,
            shared: vec![],
            choice: None,
        }
    }

    /// Replaces the planner's coding of a plane. A number beyond the planes of the layout has no effect.
    pub fn code(&mut self, plane: usize, coding: PlaneCoding) {
        let Some(planned) = self.planes.get_mut(plane) else { return };
        if *planned == coding {
            return;
        }
        *planned = coding;
        if let Some(tables) = self.shared.get_mut(plane) {
            tables.clear();
        }
    }

    /// The plan for chunks that are all plain: they are their values, so it needs no inputs and no side data.
    #[must_use]
    pub fn of_plain_chunks(self) -> Self {
        Self { plan: Plan::direct(self.plan.layout), side: Side::default(), ..self }
    }

    /// The side data that the index keeps. `shared`: whether any chunk used the shared tables.
    ///
    /// # Errors
    /// `Limit` if there is too much of it.
    pub fn side_data(&self, shared: bool) -> Result<Side> {
        let mut side = self.side.clone();
        if shared {
            side.push(SideKind::TABLES, SharedTables::to_bytes(&self.shared))?;
        }
        Ok(side)
    }

    /// The coding of a plane.
    pub(crate) fn coding(&self, plane: usize) -> PlaneCoding {
        self.planes.get(plane).copied().unwrap_or(PlaneCoding::RAW)
    }

    /// The tables that streams of a plane may share.
    pub(crate) fn tables(&self, plane: usize) -> &[u8] {
        self.shared.get(plane).map_or(&[], Vec::as_slice)
    }
}
