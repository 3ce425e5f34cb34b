//! Differences from the device's point of view: which frames of which checkpoints its values are
//! decoded from.

use std::collections::HashSet;

use s4_engine::cuda::DeviceMemory;

use crate::error::Result;
use crate::levels::{Level, Levels};
use crate::reader::Reader;

/// Chunks of a tensor that are wanted, and where its values go.
pub(super) struct Wanted {
    /// Number of the tensor, and of the request that it is for.
    pub(super) tensor: usize,
    pub(super) request: usize,
    pub(super) to: DeviceMemory,
    /// Of a tensor of an ancestor: the chunks that are wanted, in ascending order.
    pub(super) chunks: Option<Vec<u64>>,
    /// Of a rounded copy: where the values lie that it is a copy of.
    pub(super) input: Option<DeviceMemory>,
}

/// Requests, cut into what is wanted of each checkpoint of a chain.
#[derive(Default)]
pub(super) struct Chain<'a> {
    /// The checkpoint itself, its parent, and so on.
    pub(super) steps: Vec<Step<'a>>,
    /// Requests, by place, that the host decodes.
    pub(super) here: Vec<usize>,
    /// Copies of tensors that are requested, too, for the same device.
    pub(super) copies: Vec<Wanted>,
}

/// One checkpoint of a chain.
pub(super) struct Step<'a> {
    pub(super) reader: &'a Reader,
    pub(super) wanted: Vec<Wanted>,
}

impl<'a> Chain<'a> {
    /// Cuts requests, by number of the tensor, whose tensors are prepared. `trusted`: the device
    /// decodes closed bitstreams of tensors that are stored by themselves.
    pub(super) fn of(
        reader: &'a Reader,
        requests: &[(usize, DeviceMemory)],
        trusted: bool,
    ) -> Result<Self> {
        let mut chain = Self::default();
        let open = trusted || reader.manifest.closed_codecs.is_empty();
        chain.steps.push(Step { reader, wanted: vec![] });
        // An ancestor's tensor is decoded to one place; who else wants it gets it from the host.
        let mut taken = HashSet::<(usize, usize)>::new();
        for (request, &(number, to)) in requests.iter().enumerate() {
            let host = reader.host(number);
            let plan = &reader.manifest.plans[usize::from(reader.tensors[host].plan)];
            if plan.inputs.is_empty() && open {
                let (chunks, input) = (None, None);
                let wanted = Wanted { tensor: number, request, to, chunks, input };
                chain.steps[0].wanted.push(wanted);
                continue;
            }
            // Copies are decoded all at once, so that none may be of another one.
            let is_copy = |t: &usize| {
                let plan = &reader.manifest.plans[usize::from(reader.tensors[*t].plan)];
                plan.own_input().is_some()
            };
            let original = reader.own_input(host)?.filter(|t| open && !is_copy(t));
            let here =
                |r: &&(usize, DeviceMemory)| Some(r.0) == original && r.1.ordinal() == to.ordinal();
            if let Some(&(_, input)) = requests.iter().find(here) {
                let (chunks, input) = (None, Some(input));
                chain.copies.push(Wanted { tensor: number, request, to, chunks, input });
                continue;
            }
            let levels = match host == number {
                true => Levels::of(reader, host)?.for_device(),
                false => None,
            };
            let free = |levels: &Vec<Level<'_>>| {
                (0..).zip(levels).all(|(depth, l)| !taken.contains(&(depth, l.tensor)))
            };
            match levels.filter(free) {
                Some(levels) => {
                    taken
                        .extend((0..).zip(&levels).map(|(depth, l): (usize, _)| (depth, l.tensor)));
                    chain.add(request, to, &levels);
                }
                None => chain.here.push(request),
            }
        }
        Ok(chain)
    }

    /// What memory that holds the parent's values lacks: the checkpoint's own chunks. Requests for
    /// differences that the device does not decode are left to the host.
    pub(super) fn top(
        reader: &'a Reader,
        requests: &[(usize, DeviceMemory)],
        trusted: bool,
    ) -> Self {
        let mut chain = Self::default();
        let open = trusted || reader.manifest.closed_codecs.is_empty();
        let mut wanted = vec![];
        for (request, &(number, to)) in requests.iter().enumerate() {
            let host = reader.host(number);
            let plan = &reader.manifest.plans[usize::from(reader.tensors[host].plan)];
            let alone = plan.own_inputs().next().is_none();
            let own = plan.inputs.is_empty() || (plan.is_delta() && alone && host == number);
            match own && open {
                true => {
                    let (chunks, input) = (None, None);
                    wanted.push(Wanted { tensor: number, request, to, chunks, input });
                }
                false => chain.here.push(request),
            }
        }
        chain.steps.push(Step { reader, wanted });
        chain
    }

    fn add(&mut self, request: usize, to: DeviceMemory, levels: &[Level<'a>]) {
        let mut chunks: Vec<u64> = (0..levels[0].block.records.len() as u64).collect();
        for (depth, level) in levels.iter().enumerate() {
            if self.steps.len() == depth {
                self.steps.push(Step { reader: level.reader, wanted: vec![] });
            }
            let (tensor, some) = (level.tensor, Some(chunks.clone()));
            let wanted = Wanted { tensor, request, to, chunks: some, input: None };
            self.steps[depth].wanted.push(wanted);
            chunks.retain(|&c| level.is_delta(c));
        }
    }
}
