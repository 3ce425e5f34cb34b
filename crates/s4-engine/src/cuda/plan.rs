//! Plans device tensors: their samples are fetched, and planned on the caller's threads.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::OnceLock;

use rayon::ThreadPool;
use s4_format::Error;
use s4_predict::rank1::{Expected, Grid};

use super::error::{CudaError, Result};
use super::fetch::{self, Rows};
use super::worker::{Session, Task};
use super::{CudaEngine, device_memory};
use crate::engine::{TensorValues, each};
use crate::error::TensorError;
use crate::planner::{FittedOffsets, Sample, TensorFacts};
use crate::{
    DeviceMemory, Inputs, Moment, ParentSample, Preset, Scratch, TensorPlan, Values, planner,
};

/// Large tensors are kept until they add up to this many bytes: then there are enough of them for all threads.
const LATER: u64 = 128 << 20;

/// A tensor whose row and column offsets must be fitted, and the data fetched of it so far.
struct Waiting {
    tensor: usize,
    grid: Grid,
    /// Items that are not fetched yet.
    items: usize,
    /// All bytes of its items.
    len: u64,
    bytes: Vec<u8>,
}

/// The plan of a tensor, once it is made.
type Planned = OnceLock<s4_format::Result<TensorPlan>>;

/// The tensors to plan, and what planning needs.
struct Given<'a, E> {
    preset: Preset,
    tensors: &'a [TensorValues<'a>],
    inputs: &'a dyn Inputs<E>,
    pool: Option<&'a ThreadPool>,
    sessions: &'a [Session<'a>],
}

impl CudaEngine {
    /// Makes the plans that the CPU engine chooses for the same values.
    pub(super) fn plan_tensors<E: From<CudaError> + Send>(
        &self,
        preset: Preset,
        tensors: &[TensorValues<'_>],
        inputs: &dyn Inputs<E>,
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<TensorPlan>, E> {
        let memory = tensors.iter().map(device_memory).chain(inputs.memory().into_iter().map(Ok));
        let memory = memory.collect::<Result<Vec<_>>>()?;
        let workers = self.workers(Task::Plan, memory.iter().map(DeviceMemory::ordinal))?;
        let sessions = self.sessions(&workers, &memory, Task::Plan)?;
        let given = Given { preset, tensors, inputs, pool, sessions: &sessions };
        let all = (0..tensors.len()).map(|tensor| (tensor, None)).collect();
        let samples = sample_rows(&given, all)?;
        let plans: Vec<Planned> = tensors.iter().map(|_| Planned::new()).collect();
        let mut waiting = vec![];
        let looks = planner::makes_offsets(preset) || inputs.keeps_samples();
        fetch::run::<E>(&sessions, &samples, |batch| {
            let mut grids: Vec<_> = batch.iter().map(|item| (*item, None)).collect();
            let looked_at = if looks { &mut grids[..] } else { &mut [] };
            each(pool, looked_at, |((tensor, bytes), grid)| {
                let Fetched { alone, probes, .. } = split(&given, *tensor, bytes);
                let sample = if inputs.parent(*tensor).is_some() { probes } else { alone };
                *grid = self.host.cpu.wants_offsets(&about(&given, *tensor), sample);
                if inputs.keeps_samples() {
                    inputs.keep_sample(*tensor, probes);
                }
            });
            let mut now = vec![];
            for ((tensor, sample), grid) in grids {
                match grid {
                    Some(grid) => {
                        waiting.push(Waiting { tensor, grid, items: 0, len: 0, bytes: vec![] });
                    }
                    None => now.push((tensor, None, sample)),
                }
            }
            self.plan_fetched(&given, now, &plans)
        })?;
        self.plan_waiting(&given, waiting, &plans)?;
        let none = || Err(Error::corrupt("no plan was made"));
        let all = plans.into_iter().enumerate().map(|(tensor, plan)| {
            let plan = plan.into_inner().unwrap_or_else(none);
            plan.map_err(|source| CudaError::from(TensorError { tensor, source }).into())
        });
        all.collect()
    }

    /// Plans tensors whose samples were fetched, for some followed by the values of their grids.
    fn plan_fetched<E: From<CudaError> + Send>(
        &self,
        given: &Given<'_, E>,
        fetched: Vec<(usize, Option<Grid>, &[u8])>,
        plans: &[Planned],
    ) -> Result<(), E> {
        let Given { preset, inputs, pool, .. } = *given;
        let numbers: Vec<_> = fetched.iter().map(|f| f.0).collect();
        let parents = inputs.samples(&numbers)?;
        let parents = parents.into_iter().zip(planner::expected(preset, inputs, &numbers, pool)?);
        let mut work: Vec<_> = fetched.into_iter().zip(parents).collect();
        each(pool, &mut work, |((tensor, grid, bytes), (parent, expected))| {
            let (tensor, fetched) = (*tensor, (*bytes, grid.as_ref()));
            let parent = (&parent[..], expected.as_deref());
            let idle = &self.host.cpu.idle;
            let plan = |scratch: &mut _| self.plan_sample(given, tensor, fetched, parent, scratch);
            plans[tensor].get_or_init(|| idle.with(plan));
        });
        Ok(())
    }

    /// Fetches the values of grids, together with the samples again, and plans each tensor once it has all of them.
    fn plan_waiting<E: From<CudaError> + Send>(
        &self,
        given: &Given<'_, E>,
        mut waiting: Vec<Waiting>,
        plans: &[Planned],
    ) -> Result<(), E> {
        let sessions = given.sessions;
        let room = sessions.iter().map(fetch::room).min().unwrap_or_default();
        let (mut items, mut owners) = (vec![], vec![]);
        let wanted = waiting.iter().map(|w| (w.tensor, Some(w.grid))).collect();
        let rows = sample_rows(given, wanted)?;
        for (i, (w, rows)) in waiting.iter_mut().zip(rows).enumerate() {
            w.len = rows.iter().map(Rows::bytes).sum();
            let own = in_items(rows, room);
            w.items = own.len();
            owners.extend(own.iter().map(|_| i));
            items.extend(own);
        }
        // Tensors of several items, which threads then plan in parallel.
        let mut later: Vec<Waiting> = vec![];
        fetch::run::<E>(sessions, &items, |batch| {
            let mut now = vec![];
            for &(item, bytes) in batch {
                let w = &mut waiting[owners[item]];
                w.items -= 1;
                // Nearly all tensors are one item, which is looked at where it lies.
                if w.items == 0 && w.bytes.is_empty() {
                    now.push((w.tensor, Some(w.grid), bytes));
                    continue;
                }
                w.bytes.reserve_exact(w.len as usize - w.bytes.len());
                w.bytes.extend_from_slice(bytes);
                if w.items == 0 {
                    let bytes = std::mem::take(&mut w.bytes);
                    later.push(Waiting { bytes, ..*w });
                }
            }
            self.plan_fetched(given, now, plans)?;
            if later.iter().map(|w| w.len).sum::<u64>() < LATER {
                return Ok(());
            }
            self.plan_whole(given, std::mem::take(&mut later), plans)
        })?;
        self.plan_whole(given, later, plans)
    }

    /// Plans tensors of which all items were fetched.
    fn plan_whole<E: From<CudaError> + Send>(
        &self,
        given: &Given<'_, E>,
        fetched: Vec<Waiting>,
        plans: &[Planned],
    ) -> Result<(), E> {
        let fetched = fetched.iter().map(|w| (w.tensor, Some(w.grid), &w.bytes[..]));
        self.plan_fetched(given, fetched.collect(), plans)
    }

    /// The plan of a tensor whose sample was fetched. `parent`: the parent's sample, and what its
    /// rows and columns predict.
    fn plan_sample<E>(
        &self,
        given: &Given<'_, E>,
        tensor: usize,
        (bytes, grid): (&[u8], Option<&Grid>),
        (parent, expected): (&[u8], Option<&Expected>),
        scratch: &mut Scratch,
    ) -> s4_format::Result<TensorPlan> {
        let (cpu, about) = (&self.host.cpu, about(given, tensor));
        let dtype = about.dtype;
        if given.preset == Preset::Nvcomp {
            return Ok(planner::nvcomp(dtype));
        }
        scratch.counted.clear();
        let Fetched { alone, probes, moments, grid: values } = split(given, tensor, bytes);
        let fit = grid.map(|grid| move || cpu.fit(&about, grid, values));
        let offsets = FittedOffsets::new(fit.as_ref().map(|fit| fit as _));
        let values = about.values();
        let alone = |about: &TensorFacts<'_>, scratch: &mut Scratch| {
            let sample = Sample::fetched(planner::sampled_runs(values).collect(), alone);
            cpu.plan_alone(about, &sample, offsets.get()?, scratch)
        };
        let Some((manifest, number)) = given.inputs.parent(tensor) else {
            return alone(&about, scratch);
        };
        let sample_of = |(moment, fetched): (&Moment<'_>, _)| match moment.values {
            Values::Host(_) => moment.sample(dtype).map(Cow::Owned),
            Values::Device(_) => Ok(Cow::Borrowed(fetched)),
        };
        let given_moments = given.inputs.moments(tensor);
        let samples = given_moments.iter().zip(moments).map(sample_of);
        let samples = samples.collect::<s4_format::Result<Vec<_>>>()?;
        let moments = given_moments.iter().zip(&samples).map(|(m, sample)| m.with_sample(sample));
        let moments = &moments.collect::<Vec<_>>()[..];
        let parent = ParentSample { manifest, tensor: number, values: parent, expected, moments };
        let probes = Sample::fetched(planner::parent_probes(dtype, values), probes);
        cpu.plan_difference(&about, &probes, &parent, &offsets, scratch, &alone)
    }
}

/// Groups rows into items of at most the given bytes and descriptors.
fn in_items(rows: Vec<Rows>, (bytes, descriptors): (u64, u64)) -> Vec<Vec<Rows>> {
    let (mut items, mut left) = (vec![], (0, 0));
    for rows in rows {
        let mut rest = Some(rows);
        while let Some(rows) = rest {
            let (mut now, mut later) = rows.split(left.0);
            if now.bytes() > left.0 || now.descriptors() > left.1 {
                items.push(vec![]);
                left = (bytes, descriptors);
                (now, later) = rows.split(left.0);
            }
            left.0 = left.0.saturating_sub(now.bytes());
            left.1 = left.1.saturating_sub(now.descriptors());
            if let Some(item) = items.last_mut() {
                item.push(now);
            }
            rest = later;
        }
    }
    items
}

fn about<'a, E>(given: &Given<'a, E>, tensor: usize) -> TensorFacts<'a> {
    let t = &given.tensors[tensor];
    let bytes = usize::try_from(t.values.bytes()).unwrap_or(usize::MAX);
    let (role, choice) = (t.role, given.inputs.choice(tensor));
    TensorFacts::new(given.preset, (t.dtype, t.shape, bytes), role, choice)
}

/// Whether a tensor's values are fetched at the positions where they are compared with a parent's:
/// it has a parent, or will be one.
fn is_probed<E>(given: &Given<'_, E>, tensor: usize) -> bool {
    given.inputs.parent(tensor).is_some() || given.inputs.keeps_samples()
}

/// The runs of values that are compared with a parent's; empty if they are sampled in any case.
fn probes_of<E>(given: &Given<'_, E>, tensor: usize) -> Vec<Range<u64>> {
    let t = &given.tensors[tensor];
    let values = t.values.bytes() / t.dtype.value_width() as u64;
    match is_probed(given, tensor) && !planner::are_same(t.dtype, values) {
        true => planner::parent_probes(t.dtype, values),
        false => vec![],
    }
}

/// The data fetched of a tensor, one part after the other.
struct Fetched<'a> {
    alone: &'a [u8],
    probes: &'a [u8],
    /// Samples of its moments, if it has some; empty for moments in host memory.
    moments: Vec<&'a [u8]>,
    grid: &'a [u8],
}

/// Splits the data fetched of a tensor into its parts.
fn split<'b, E>(given: &Given<'_, E>, tensor: usize, bytes: &'b [u8]) -> Fetched<'b> {
    let t = &given.tensors[tensor];
    let (width, values) = (t.dtype.value_width() as u64, t.values.bytes());
    let mut rest = bytes;
    let mut take = |runs: &mut dyn Iterator<Item = Range<u64>>| {
        let len = runs.map(|r| r.end - r.start).sum::<u64>() as usize;
        let (part, left) = rest.split_at(len.min(rest.len()));
        rest = left;
        part
    };
    let bytes_of = |r: Range<u64>| r.start * width..r.end * width;
    let alone = take(&mut planner::sampled_runs(values / width).map(bytes_of));
    let probes = match planner::are_same(t.dtype, values / width) {
        true => alone,
        false => take(&mut probes_of(given, tensor).into_iter().map(bytes_of)),
    };
    let moments = given.inputs.moments(tensor).iter().map(|m| match m.values {
        Values::Device(_) => take(&mut m.probes(t.dtype)),
        Values::Host(_) => &[][..],
    });
    let moments = moments.collect();
    Fetched { alone, probes, moments, grid: rest }
}

/// The rows to fetch of each tensor: its sample, then those of its moments, which are on the same
/// device, then the values of its grid if it has one.
fn sample_rows<E>(
    given: &Given<'_, E>,
    wanted: Vec<(usize, Option<Grid>)>,
) -> Result<Vec<Vec<Rows>>> {
    let mut work: Vec<_> = wanted.into_iter().map(|w| (w, None)).collect();
    // Worth several threads: grids have a range for each row.
    each(given.pool, &mut work, |((tensor, grid), rows)| {
        *rows = Some(rows_of(given, *tensor, grid.as_ref()));
    });
    work.into_iter().filter_map(|w| w.1).collect()
}

fn rows_of<E>(given: &Given<'_, E>, tensor: usize, grid: Option<&Grid>) -> Result<Vec<Rows>> {
    let t = &given.tensors[tensor];
    let (memory, width) = (device_memory(t)?, t.dtype.value_width() as u64);
    let runs = planner::sampled_runs(t.values.bytes() / width).chain(probes_of(given, tensor));
    let mut rows = Rows::of(memory, width, runs)?;
    for moment in given.inputs.moments(tensor) {
        if let Some(memory) = moment.values.memory() {
            rows.extend(Rows::of(memory, 1, moment.probes(t.dtype))?);
        }
    }
    if let Some(grid) = grid {
        rows.extend(Rows::of(memory, width, grid.ranges())?);
    }
    Ok(rows)
}
