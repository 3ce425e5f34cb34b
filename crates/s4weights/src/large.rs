//! Writes tensors with their own chunks: first those that need no others, then weights with contexts from
//! their moments, then copies of other tensors. While tensors on devices are encoded, those after them are
//! planned and those before them closed.

use std::collections::HashMap;
use std::iter;
use std::ops::Range;
use std::thread::{self, ScopedJoinHandle};

use rayon::prelude::*;
#[cfg(feature = "cuda")]
use s4_engine::cuda::FetchItem;
use s4_engine::{Moment, TensorValues, Values, makes_copies, may_use_moments};
use s4_format::ChunkRecord;
use s4_format::limits::MAX_UPDATES;
use s4_format::manifest::RoleKind;

use crate::batch::Batch;
use crate::close::{Closed, WORTH_A_THREAD};
use crate::copies::{self, Candidates, Looks, Original};
use crate::error::Result;
use crate::parallel::{Pools, join, pool, spawn, thread_count, worth};
use crate::pipeline::Coded;
use crate::progress::Meter;
use crate::write::{Awaited, Registered};
use crate::writer::Writer;

/// Roughly how many tensors in host memory can be sampled in the time that starting a thread takes.
const LOOKED_AT: usize = 256;
/// Bytes of a tensor that are fetched from a device at a time.
#[cfg(feature = "cuda")]
const FETCHED: u64 = 1 << 20;

/// Where values are: the number of a device, or `None` for the host.
type Place = Option<u32>;

fn place(t: &TensorValues<'_>) -> Place {
    t.values.memory().map(|m| m.ordinal())
}

/// Number of tensors on devices that are planned together: at first, when nothing else can be done
/// meanwhile, and at most. With many tensors planning takes as long as encoding.
const PLANNED: (usize, usize) = (256, 2048);

/// Large tensors, and which are copies.
struct Large<'a> {
    registered: &'a [Registered<'a>],
    tensors: Vec<TensorValues<'a>>,
    /// For each tensor that will be stored as a copy, the index of its original.
    originals: Vec<Option<usize>>,
    /// For each tensor, the indices of its moments if it may be predicted from them.
    moments: Vec<Vec<usize>>,
    /// Whether others need a tensor.
    needed: Vec<bool>,
    /// The tensors that others need, once they are planned.
    stored: HashMap<usize, Stored>,
}

/// A tensor that is stored before others that need it.
struct Stored {
    /// Whether contexts may be derived from it: decoding it needs no other tensors.
    self_contained: bool,
    /// Empty until it is written.
    records: Vec<ChunkRecord>,
}

impl<'a> Large<'a> {
    fn place(&self, i: usize) -> Place {
        place(&self.tensors[i])
    }

    fn place_of_original(&self, i: usize) -> Place {
        self.originals[i].and_then(|o| self.place(o))
    }

    /// Whether the original of a copy must be fetched first: it is on a device, and not on the
    /// copy's.
    fn is_fetched(&self, i: usize) -> bool {
        self.place_of_original(i).is_some() && self.place_of_original(i) != self.place(i)
    }

    /// Whether the moments of a tensor must be fetched first: one is on a device, and not on the
    /// tensor's.
    fn has_far_moments(&self, i: usize) -> bool {
        let mut places = self.moments[i].iter().map(|&m| self.place(m));
        places.any(|place| place.is_some() && place != self.place(i))
    }

    /// The tensors in the order of writing, in batches that an engine plans and encodes together.
    fn batches(&self) -> Vec<Vec<usize>> {
        let (copies, others): (Vec<_>, Vec<_>) =
            (0..self.tensors.len()).partition(|i| self.originals[*i].is_some());
        let (weights, others): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|i| !self.moments[*i].is_empty());
        let on_device = |i: usize| self.place(i).is_some();
        let others = others.chunk_by(|a, b| on_device(*a) == on_device(*b));
        let weights = weights.chunk_by(|a, b| {
            on_device(*a) == on_device(*b) && ![*a, *b].iter().any(|i| self.has_far_moments(*i))
        });
        let places = |i: usize| (self.place(i), self.place_of_original(i));
        let copies = copies.chunk_by(|a, b| places(*a) == places(*b) && !self.is_fetched(*a));
        let (mut batches, mut most) = (vec![], PLANNED.0);
        for mut run in others.chain(weights).chain(copies) {
            while self.may_be_cut(run) && run.len() > most {
                let (now, later) = run.split_at(most);
                batches.push(now.to_vec());
                (run, most) = (later, PLANNED.1.min(2 * most));
            }
            batches.push(run.to_vec());
        }
        batches
    }

    /// Whether parts of a run may be planned or closed while others are encoded. On the host that would take the
    /// threads that encode, and values that must be fetched first belong to one tensor.
    fn may_be_cut(&self, run: &[usize]) -> bool {
        let i = run[0];
        self.place(i).is_some() && !self.has_far_moments(i) && !self.is_fetched(i)
    }

    /// Whether a batch may be planned while another one is encoded.
    fn may_be_planned_ahead(&self, batch: &[usize]) -> bool {
        self.originals[batch[0]].is_none() && self.may_be_cut(batch)
    }

    /// The moments of a tensor, if it may be predicted from them.
    fn moments_of(&self, i: usize, fetched: Option<&'a [Vec<u8>]>) -> Vec<Moment<'a>> {
        let moment = |(k, number): (usize, &usize)| {
            self.stored.get(number).filter(|s| s.self_contained)?;
            let TensorValues { dtype, values, .. } = self.tensors[*number];
            let values = fetched.map_or(values, |f| Values::Host(&f[k]));
            // A tensor table has at most 2^22 records.
            let tensor = self.registered[*number].number as u32;
            Some(Moment { tensor, dtype, values, records: &[] })
        };
        // All or none.
        let moments = self.moments[i].iter().enumerate().map(moment);
        moments.collect::<Option<_>>().unwrap_or_default()
    }

    /// Adds the records of moments, which are written by now.
    fn add_records<'b>(&'b self, batch: &[usize], moments: &mut [Vec<Moment<'b>>]) {
        for (i, moments) in batch.iter().zip(moments) {
            for (moment, number) in moments.iter_mut().zip(&self.moments[*i]) {
                moment.records = self.stored.get(number).map_or(&[], |s| &s.records);
            }
        }
    }

    /// Notes which tensors of a planned batch, by their index in it, are self-contained.
    fn note_plans(&mut self, batch: &[usize], self_contained: impl Fn(usize) -> bool) {
        for (k, &i) in batch.iter().enumerate().filter(|(_, i)| self.needed[**i]) {
            let self_contained = self_contained(k);
            self.stored.insert(i, Stored { self_contained, records: vec![] });
        }
    }

    /// Notes the records of a batch, which is written.
    fn note_records(&mut self, batch: &[usize], coded: &[Coded]) {
        for (i, coded) in batch.iter().zip(coded) {
            if let Some(stored) = self.stored.get_mut(i) {
                stored.records.clone_from(&coded.records);
            }
        }
    }

    /// Whether a batch needs values that are on devices.
    fn needs_device(&self, batch: &[usize]) -> bool {
        let needed = |i: usize| self.moments[i].iter().copied().chain(self.originals[i]);
        batch.iter().any(|&i| self.place(i).is_some() || needed(i).any(|n| self.place(n).is_some()))
    }
}

impl Writer {
    /// Writes tensors with chunks of their own, from host or device memory. Their order and bytes
    /// are the same as if all were in host memory.
    pub(crate) fn write_large(
        &mut self,
        registered: &[Registered<'_>],
        awaited: &mut Awaited,
        meter: &mut Meter,
    ) -> Result<()> {
        let roles = self.roles.clone();
        let mut tensors = Vec::with_capacity(registered.len());
        for t in registered {
            let (dtype, shape, values) = (t.source.dtype, t.source.shape, t.source.values);
            let role = roles.as_ref().and_then(|r| r.of(t.number));
            tensors.push(TensorValues { dtype, shape, values, role });
        }
        let originals = self.find_copies(registered, &tensors)?;
        let moments = self.find_moments(registered, &tensors, &originals);
        let mut needed = vec![false; tensors.len()];
        let inputs = originals.iter().flatten().chain(moments.iter().flatten());
        inputs.for_each(|&i| needed[i] = true);
        let stored = HashMap::new();
        let mut large = Large { registered, tensors, originals, moments, needed, stored };
        let batches = large.batches();
        awaited.large = batches.iter().filter(|batch| large.needs_device(batch)).count();
        awaited.tell();
        self.write_batches(&mut large, &batches, awaited, meter)
    }

    /// Writes batches, one after the other. While one is encoded, the next one is planned, if it is on devices, and the
    /// one before is closed.
    fn write_batches(
        &mut self,
        large: &mut Large<'_>,
        batches: &[Vec<usize>],
        awaited: &mut Awaited,
        meter: &mut Meter,
    ) -> Result<()> {
        let (planner, closer, pools) = (self.planner(), self.closer(), self.pools(&large.tensors)?);
        let registered = large.registered;
        thread::scope(|scope| {
            let (mut planning, mut closing) = (None, None);
            for (at, numbers) in batches.iter().enumerate() {
                let coded = match large.originals[numbers[0]] {
                    Some(_) => self.write_copies(large, numbers, &pools, meter)?,
                    None => {
                        let fetched = self.fetch_moments(large, numbers)?;
                        let planned = match planning.take() {
                            Some(thread) => join(thread),
                            None => {
                                planner.plan(self.batch(large, numbers, fetched.as_deref()), &pools)
                            }
                        };
                        let mut planned = planned?;
                        large.note_plans(numbers, |i| !self.needs_others(&planned.plans[i].plan));
                        let next = batches.get(at + 1);
                        if let Some(next) = next.filter(|next| large.may_be_planned_ahead(next)) {
                            let batch = self.batch(large, next, None);
                            planning = Some(spawn(scope, || planner.plan(batch, &pools)));
                        }
                        large.add_records(numbers, &mut planned.batch.moments);
                        self.encode_planned(planned, &pools, meter)?
                    }
                };
                large.note_records(numbers, &coded);
                if large.needs_device(numbers) {
                    awaited.large -= 1;
                    awaited.tell();
                }
                self.add_from(closing.take())?;
                let coded: Vec<_> = numbers.iter().map(|&i| &registered[i]).zip(coded).collect();
                let (closer, pool) = (&closer, pools.of(large.place(numbers[0]).is_some()));
                if pool.is_some() && coded.len() > WORTH_A_THREAD {
                    closing = Some(spawn(scope, move || closer.close(coded, pool)));
                } else {
                    self.add_closed(closer.close(coded, None)?)?;
                }
            }
            self.add_from(closing)
        })
    }

    /// Adds the tensors that a thread closes, if there is one.
    fn add_from(
        &mut self,
        thread: Option<ScopedJoinHandle<'_, Result<Vec<Closed>>>>,
    ) -> Result<()> {
        thread.map_or(Ok(()), |thread| self.add_closed(join(thread)?))
    }

    /// For each tensor, the index of the tensor that it will be stored as a copy of.
    fn find_copies(
        &mut self,
        registered: &[Registered<'_>],
        tensors: &[TensorValues<'_>],
    ) -> Result<Vec<Option<usize>>> {
        if !makes_copies(self.options.preset) {
            return Ok(vec![None; tensors.len()]);
        }
        let candidates = Candidates::of(tensors);
        let looks = self.looks(registered, tensors, &candidates.looks(tensors))?;
        let equal = candidates.equal(&looks);
        let more = self.looks(registered, tensors, &equal.looks(tensors))?;
        let equal = equal.firsts(tensors.len(), &more);
        let names: Vec<_> = registered.iter().map(|t| t.source.name).collect();
        let mut originals = candidates.copies(tensors, &names, &looks, &equal);
        for found in originals.iter_mut().filter(|o| o.is_some()) {
            *found = found.take().filter(|_| self.may_have_input());
        }
        Ok(originals)
    }

    /// The wanted bytes of each tensor, by index; empty if none are wanted.
    fn looks(
        &self,
        registered: &[Registered<'_>],
        tensors: &[TensorValues<'_>],
        wanted: &Looks,
    ) -> Result<Vec<Vec<u8>>> {
        let mut looks = vec![vec![]; tensors.len()];
        self.fetch_looks(registered, tensors, wanted, &mut looks)?;
        let threads = worth(thread_count(self.options.threads), (wanted.len() / LOOKED_AT) as u64);
        // The sampled bytes of a tensor are scattered in memory.
        let look = |(i, bytes): &(usize, Vec<Range<u64>>)| match tensors[*i].values {
            // The ranges lie within the tensor.
            Values::Host(data) => {
                let parts = bytes.iter().map(|r| &data[r.start as usize..r.end as usize]);
                Some((*i, parts.collect::<Vec<_>>().concat()))
            }
            Values::Device(_) => None,
        };
        let of_host: Vec<_> = match pool(threads)? {
            Some(pool) => pool.install(|| wanted.par_iter().filter_map(look).collect()),
            None => wanted.iter().filter_map(look).collect(),
        };
        of_host.into_iter().for_each(|(i, look)| looks[i] = look);
        Ok(looks)
    }

    /// For each tensor, the indices of its first moment, and of its second if it has one, if it may be stored as a delta
    /// that is predicted from them.
    fn find_moments(
        &self,
        registered: &[Registered<'_>],
        tensors: &[TensorValues<'_>],
        originals: &[Option<usize>],
    ) -> Vec<Vec<usize>> {
        let mut out = vec![vec![]; tensors.len()];
        if self.recall.as_ref().is_some_and(|recall| recall.is_read_back()) {
            return out;
        }
        let parent = self.options.parent.as_ref().filter(|p| p.depth() < MAX_UPDATES);
        let Some(parent) = parent else { return out };
        let values = |t: &TensorValues<'_>| t.values.bytes() / t.dtype.value_width() as u64;
        let mut moments: HashMap<u32, [Option<usize>; 2]> = HashMap::new();
        for (i, role) in tensors.iter().enumerate().filter_map(|(i, t)| Some((i, t.role?.row))) {
            let of = match role.kind {
                RoleKind::ExpAvg => 0,
                RoleKind::ExpAvgSq => 1,
                _ => continue,
            };
            if originals[i].is_none() {
                moments.entry(role.parameter).or_default()[of].get_or_insert(i);
            }
        }
        for (i, t) in tensors.iter().enumerate() {
            let weight = t.role.map(|r| r.row);
            let weight = weight.filter(|r| matches!(r.kind, RoleKind::Weight | RoleKind::Master));
            let found = weight.and_then(|r| moments.get(&r.parameter));
            let Some(&[Some(first), second]) = found else { continue };
            let numbers: Vec<_> = iter::once(first).chain(second).collect();
            let alike = numbers.iter().all(|n| values(&tensors[*n]) == values(t));
            let dtypes: Vec<_> = numbers.iter().map(|n| tensors[*n].dtype).collect();
            let fits = may_use_moments(self.options.preset, t.dtype, &dtypes);
            let has_parent = || parent.find(registered[i].source.name).is_some();
            if alike && fits && originals[i].is_none() && has_parent() {
                out[i] = numbers;
            }
        }
        out
    }

    /// Tensors to be planned and encoded. The values of moments are those in `fetched`, or else where they are; their
    /// records come later ([`Large::add_records`]).
    fn batch<'a>(
        &mut self,
        large: &Large<'a>,
        numbers: &[usize],
        fetched: Option<&'a [Vec<u8>]>,
    ) -> Batch<'a> {
        let mut batch = Batch::default();
        for &i in numbers {
            let source = &large.registered[i].source;
            let parent = self.parent_of(source.name, source.dtype, source.shape);
            batch.push(source, large.tensors[i], parent);
            batch.moments.push(large.moments_of(i, fetched));
        }
        batch
    }

    /// Copies the moments of a batch to the host, if they must be: it is one tensor then.
    fn fetch_moments(&self, large: &Large<'_>, batch: &[usize]) -> Result<Option<Vec<Vec<u8>>>> {
        if !large.has_far_moments(batch[0]) {
            return Ok(None);
        }
        let copy = |&number: &usize| match large.tensors[number].values {
            Values::Host(values) => Ok(values.to_vec()),
            Values::Device(_) => self.fetch_whole(large, Some(number)),
        };
        large.moments[batch[0]].iter().map(copy).collect::<Result<_>>().map(Some)
    }

    /// Writes copies of tensors that are already written. All copies are in one place, and so are
    /// all their originals.
    fn write_copies(
        &mut self,
        large: &Large<'_>,
        numbers: &[usize],
        pools: &Pools,
        meter: &mut Meter,
    ) -> Result<Vec<Coded>> {
        let (mut batch, mut plans, mut inputs) = (Batch::default(), vec![], vec![]);
        let fetched = match numbers.first().filter(|i| large.is_fetched(**i)) {
            Some(&i) => self.fetch_whole(large, large.originals[i])?,
            None => vec![],
        };
        for &i in numbers {
            let Some(from) = large.originals[i] else { continue };
            batch.push(&large.registered[i].source, large.tensors[i], None);
            // A tensor table has at most 2^22 records.
            let number = large.registered[from].number as u32;
            plans.push(copies::plan(large.tensors[i].dtype, large.tensors[from].dtype, number));
            let TensorValues { dtype, mut values, .. } = large.tensors[from];
            if large.is_fetched(i) {
                values = Values::Host(&fetched);
            }
            let records = large.stored.get(&from).map_or(&[][..], |s| &s.records);
            inputs.push(Original { values, dtype, records });
        }
        self.encode_copies(&batch, plans, inputs, pools, meter)
    }
}

#[cfg(feature = "cuda")]
impl Writer {
    /// Copies the bytes to compare of tensors on devices.
    fn fetch_looks(
        &self,
        registered: &[Registered<'_>],
        tensors: &[TensorValues<'_>],
        wanted: &[(usize, Vec<Range<u64>>)],
        looks: &mut [Vec<u8>],
    ) -> Result<()> {
        let there = |(i, bytes): &(usize, Vec<_>)| {
            Some((*i, FetchItem::of(tensors[*i].values.memory()?, bytes.iter().cloned())))
        };
        let (numbers, items): (Vec<_>, Vec<_>) = wanted.iter().filter_map(there).unzip();
        let name = |i: usize| Some(registered[*numbers.get(i)?].source.name);
        self.fetch(&items, name, |i, bytes| looks[numbers[i]] = bytes.to_vec())
    }

    /// Copies a tensor from its device; nothing if there is no tensor or it is not on a device.
    fn fetch_whole(&self, large: &Large<'_>, number: Option<usize>) -> Result<Vec<u8>> {
        let mut out = vec![];
        let found = number.and_then(|n| Some((n, large.tensors[n].values.memory()?)));
        let Some((number, memory)) = found else { return Ok(out) };
        let parts = (0..memory.bytes()).step_by(FETCHED as usize);
        let item = |first: u64| {
            let part = first..memory.bytes().min(first + FETCHED);
            FetchItem::of(memory, iter::once(part))
        };
        let name = |_| Some(large.registered[number].source.name);
        let items: Vec<_> = parts.map(item).collect();
        self.fetch(&items, name, |_, bytes| out.extend_from_slice(bytes))?;
        Ok(out)
    }

    /// Copies items of device memory to the host, in order. `name` gives the tensor's name by the
    /// index of the item.
    fn fetch<'a>(
        &self,
        items: &[FetchItem],
        name: impl FnOnce(usize) -> Option<&'a str>,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        use crate::inputs::Failure;

        let Some(engine) = self.options.engine.as_ref() else { return Ok(()) };
        if items.is_empty() {
            return Ok(());
        }
        let done = engine.fetch::<Failure>(items, |batch| {
            batch.iter().for_each(|(i, bytes)| take(*i, bytes));
            Ok(())
        });
        done.map_err(|e| e.named(&self.name, name))
    }
}

/// Without device engines, no tensor is on a device.
#[cfg(not(feature = "cuda"))]
impl Writer {
    fn fetch_looks<T>(
        &self,
        _: &[Registered<'_>],
        _: &[TensorValues<'_>],
        _: &[T],
        _: &mut [Vec<u8>],
    ) -> Result<()> {
        Ok(())
    }

    fn fetch_whole(&self, _: &Large<'_>, _: Option<usize>) -> Result<Vec<u8>> {
        Ok(vec![])
    }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "tensors on devices that nobody reads")]
mod tests {
    use s4_engine::DeviceMemory;
    use s4_format::DType;

    use super::*;
    use crate::tensor_source::TensorSource;

    fn tensor<'a>(t: &Registered<'a>) -> TensorValues<'a> {
        let TensorSource { dtype, shape, values, .. } = t.source;
        TensorValues { dtype, shape, values, role: None }
    }

    /// The batches of `count` moments, as many weights and as many copies of weights: the run that each is of, and its
    /// length. `device` tells where a tensor is.
    fn lengths(count: usize, device: impl Fn(usize) -> Option<u32>) -> Vec<(usize, usize)> {
        let data = [0; 4];
        let source = |i| {
            // SAFETY: nobody uses it.
            let memory =
                device(i).map(|ordinal| unsafe { DeviceMemory::new(ordinal, 1 << 40, 4, 0) });
            let values = memory.map_or(Values::Host(&data), Values::Device);
            Registered { number: i, source: TensorSource::new("t", DType::Float32, &[1], values) }
        };
        let registered: Vec<_> = (0..3 * count).map(source).collect();
        let numbers = 0..3 * count;
        let large = Large {
            registered: &registered,
            tensors: registered.iter().map(tensor).collect(),
            originals: numbers.clone().map(|i| (i >= 2 * count).then(|| i - count)).collect(),
            moments: numbers
                .map(|i| if i / count == 1 { vec![i - count] } else { vec![] })
                .collect(),
            needed: vec![],
            stored: HashMap::new(),
        };
        let batches = large.batches();
        let all = batches.concat();
        assert!(all.iter().copied().eq(0..3 * count), "{all:?}");
        batches.iter().map(|batch| (batch[0] / count, batch.len())).collect()
    }

    #[test]
    fn runs_on_devices_are_cut_into_batches_that_grow() {
        let found = lengths(1000, |_| Some(0));
        let expected = [(0, 256), (0, 512), (0, 232), (1, 1000), (2, 1000)];
        assert_eq!(found, expected);
        let found = lengths(6000, |_| Some(0));
        let sizes = [256, 512, 1024, 2048, 2048, 112].map(|len| (0, len));
        let later = |run| [2048, 2048, 1904].map(move |len| (run, len));
        assert_eq!(found, [&sizes[..], &later(1), &later(2)].concat());
    }

    #[test]
    fn runs_on_the_host_are_whole_and_values_from_elsewhere_are_fetched_for_one_tensor_at_a_time() {
        let one = |run| vec![(run, 1); 1000];
        assert_eq!(lengths(1000, |_| None), [(0, 1000), (1, 1000), (2, 1000)]);
        // Only the moments are on a device.
        let found = lengths(1000, |i| (i < 1000).then_some(0));
        assert_eq!(found[..3], [(0, 256), (0, 512), (0, 232)]);
        assert_eq!(found[3..], [one(1), vec![(2, 1000)]].concat());
        // All are, but the weights on another one.
        let found = lengths(1000, |i| Some(u32::from(i / 1000 == 1)));
        assert_eq!(found[3..], [one(1), one(2)].concat());
        // Only the weights are.
        let found = lengths(1000, |i| (i / 1000 == 1).then_some(0));
        assert_eq!(found[..1], [(0, 1000)]);
        assert_eq!(found[4..], one(2));
    }
}
