//! Decoding deltas on a device: the frames, of each checkpoint of a chain, that values are decoded
//! from.

use std::collections::{HashMap, HashSet};

use s4_engine::cuda::DeviceMemory;

use crate::error::Result;
use crate::levels::{Level, Levels};
use crate::reader::Reader;

/// Chunks of a tensor that are wanted, and where its values go.
pub(super) struct Wanted {
    /// Number of the tensor, and index of the request that it is for. `None`: a moment that only
    /// serves to derive contexts, and is overwritten later.
    pub(super) tensor: usize,
    pub(super) request: Option<usize>,
    pub(super) to: DeviceMemory,
    /// The chunks that are wanted, in ascending order; `None`: all.
    pub(super) chunks: Option<Vec<u64>>,
    /// Of a copy: where the values of its original are.
    pub(super) input: Option<DeviceMemory>,
    /// Of weights that need moments: where the values of both are; twice the same if they need one.
    pub(super) moments: Option<[DeviceMemory; 2]>,
}

impl Wanted {
    fn new(tensor: usize, request: usize, to: DeviceMemory) -> Self {
        let (chunks, input, moments) = Default::default();
        Self { tensor, request: Some(request), to, chunks, input, moments }
    }
}

/// Requests, split by the checkpoints of a chain.
#[derive(Default)]
pub(super) struct Chain<'a> {
    /// Ancestors' weights with contexts from moments, and these moments, in the order of decoding.
    /// The moments are put where the checkpoint's own moments will be, which is free until then.
    pub(super) before: Vec<Step<'a>>,
    /// The checkpoint itself, its parent, and so on.
    pub(super) steps: Vec<Step<'a>>,
    /// Indices of the requests that the host decodes.
    pub(super) on_host: Vec<usize>,
    /// Weights with contexts from moments that are requested, too, for the same device.
    pub(super) with_moments: Vec<Wanted>,
    /// Copies of tensors that are requested, too, for the same device.
    pub(super) copies: Vec<Wanted>,
}

/// Weights with contexts from moments, and what they are decoded from.
struct WithMoments<'a> {
    request: usize,
    to: DeviceMemory,
    levels: Vec<Level<'a>>,
    /// For each level, the moments that it needs.
    moments: Vec<Vec<Place<'a>>>,
}

/// A moment of a checkpoint of the chain, and where its values will be.
struct Place<'a> {
    tensor: usize,
    to: DeviceMemory,
    /// Of an ancestor's moment: the levels that it is decoded from.
    levels: Vec<Level<'a>>,
}

/// One checkpoint of a chain.
pub(super) struct Step<'a> {
    pub(super) reader: &'a Reader,
    pub(super) wanted: Vec<Wanted>,
}

impl<'a> Chain<'a> {
    /// Splits requests, by number of the tensor; the tensors must be prepared. `trusted`: the
    /// device decodes closed codecs of tensors that need no others.
    pub(super) fn of(
        reader: &'a Reader,
        requests: &[(usize, DeviceMemory)],
        trusted: bool,
    ) -> Result<Self> {
        let mut chain = Self::default();
        let open = trusted || reader.manifest.closed_codecs.is_empty();
        chain.steps.push(Step { reader, wanted: vec![] });
        // An ancestor's tensor is decoded to one place only; other requests that need it are
        // decoded by the host.
        let mut taken = HashSet::<(usize, usize)>::new();
        let wanted = Places::of(requests);
        let mut with_moments = WithMoments::finder(reader, &wanted);
        for (request, &(number, to)) in requests.iter().enumerate() {
            let host = reader.host(number);
            let plan = reader.plan(host);
            if plan.inputs.is_empty() && open {
                chain.steps[0].wanted.push(Wanted::new(number, request, to));
                continue;
            }
            // All copies are decoded together, so none may be a copy of another one.
            let is_copy = |t: &usize| reader.plan(*t).own_input().is_some();
            let original = reader.own_input(host)?.filter(|t| open && !is_copy(t));
            if let Some(input) = original.and_then(|t| wanted.get(t, to.ordinal())) {
                let wanted = Wanted::new(number, request, to);
                chain.copies.push(Wanted { input: Some(input), ..wanted });
                continue;
            }
            let levels = match host == number {
                true => Levels::of(reader, host)?.for_device(),
                false => None,
            };
            let free = |levels: &Vec<Level<'_>>| {
                (0..).zip(levels).all(|(depth, l)| !taken.contains(&(depth, l.tensor)))
            };
            let Some(levels) = levels.filter(free) else {
                chain.on_host.push(request);
                continue;
            };
            let names = levels.iter().map(|l| l.tensor).enumerate().collect::<Vec<_>>();
            if levels.iter().any(Level::has_moment_contexts) {
                if !with_moments.add(request, to, levels)? {
                    chain.on_host.push(request);
                    continue;
                }
            } else {
                chain.add(request, to, &levels, 0);
            }
            taken.extend(names);
        }
        chain.add_with_moments(with_moments.found);
        Ok(chain)
    }

    /// The chunks to decode over the parent's values: the checkpoint's own only. Requests for deltas that the
    /// device cannot decode are left to the host.
    pub(super) fn top(
        reader: &'a Reader,
        requests: &[(usize, DeviceMemory)],
        trusted: bool,
    ) -> Result<Self> {
        let mut chain = Self::default();
        let open = trusted || reader.manifest.closed_codecs.is_empty();
        let (places, mut wanted) = (Places::of(requests), vec![]);
        for (request, &(number, to)) in requests.iter().enumerate() {
            let host = reader.host(number);
            let plan = reader.plan(host);
            let self_contained = plan.own_inputs().next().is_none();
            let own =
                plan.inputs.is_empty() || (plan.is_delta() && self_contained && host == number);
            let one = Wanted::new(number, request, to);
            if own && open {
                wanted.push(one);
                continue;
            }
            let block = match plan.has_moments() && open && host == number {
                true => reader.block(host)?,
                false => None,
            };
            let moments = match block {
                Some(block) => {
                    let numbers = reader.own_inputs(host, &block.side)?;
                    let place = |n: &usize| places.get(*n, to.ordinal());
                    numbers.first().and_then(place).zip(numbers.last().and_then(place))
                }
                None => None,
            };
            match moments {
                Some((m, v)) => chain.with_moments.push(Wanted { moments: Some([m, v]), ..one }),
                None => chain.on_host.push(request),
            }
        }
        chain.steps.push(Step { reader, wanted });
        Ok(chain)
    }

    /// Adds the levels of a tensor, from depth `first` on.
    fn add(&mut self, request: usize, to: DeviceMemory, levels: &[Level<'a>], first: usize) {
        for (depth, (level, chunks)) in levels.iter().zip(wanted_chunks(levels)).enumerate() {
            if self.steps.len() == depth {
                self.steps.push(Step { reader: level.reader, wanted: vec![] });
            }
            if depth >= first {
                let wanted = Wanted::new(level.tensor, request, to);
                self.steps[depth].wanted.push(Wanted { chunks: Some(chunks), ..wanted });
            }
        }
    }

    /// Adds weights with contexts from moments: those of ancestors before everything else, the
    /// checkpoint's own after their moments.
    fn add_with_moments(&mut self, all: Vec<WithMoments<'a>>) {
        let mut early = vec![];
        for with_moments in all {
            let WithMoments { request, to, levels, moments } = &with_moments;
            let chunks = wanted_chunks(levels).into_iter().next();
            let places = both(&moments[0]);
            let own =
                Wanted { chunks, moments: places, ..Wanted::new(levels[0].tensor, *request, *to) };
            self.with_moments.push(own);
            match moments[1..].iter().any(|places| !places.is_empty()) {
                true => early.push(with_moments),
                false => self.add(*request, *to, levels, 1),
            }
        }
        let deepest = early.iter().map(|t| t.levels.len()).max().unwrap_or(0);
        for depth in (1..deepest).rev() {
            let (mut known, mut passes, mut weights) =
                (HashSet::new(), Vec::<Step<'a>>::new(), vec![]);
            let mut reader = None;
            for WithMoments { request, to, levels, moments } in &early {
                let Some(level) = levels.get(depth) else { continue };
                reader = Some(level.reader);
                let chunks = wanted_chunks(levels).into_iter().nth(depth);
                let places = &moments[depth];
                let own = Wanted::new(level.tensor, *request, *to);
                weights.push(Wanted { chunks, moments: both(places), ..own });
                for place in places.iter().filter(|p| known.insert(p.tensor)) {
                    for (i, (level, chunks)) in
                        place.levels.iter().zip(wanted_chunks(&place.levels)).enumerate()
                    {
                        if passes.len() == i {
                            passes.push(Step { reader: level.reader, wanted: vec![] });
                        }
                        let wanted = Wanted::new(level.tensor, 0, place.to);
                        let some = Some(chunks);
                        passes[i].wanted.push(Wanted { request: None, chunks: some, ..wanted });
                    }
                }
            }
            self.before.extend(passes.into_iter().rev());
            self.before.extend(reader.map(|reader| Step { reader, wanted: weights }));
        }
    }
}

/// Where the values of both moments are; `None` if there are none.
fn both(places: &[Place<'_>]) -> Option<[DeviceMemory; 2]> {
    Some([places.first()?.to, places.last()?.to])
}

/// The chunks that are wanted of each level: all of the first, then those that are deltas in every
/// level before.
fn wanted_chunks(levels: &[Level<'_>]) -> Vec<Vec<u64>> {
    let mut chunks: Vec<u64> = (0..levels[0].block.records.len() as u64).collect();
    let of = |level: &Level<'_>| {
        let wanted = chunks.clone();
        chunks.retain(|&c| level.is_delta(c));
        wanted
    };
    levels.iter().map(of).collect()
}

/// Where tensors' values are requested, by number of the tensor and of the device.
struct Places(HashMap<(usize, u32), DeviceMemory>);

impl Places {
    fn of(requests: &[(usize, DeviceMemory)]) -> Self {
        let mut places = HashMap::with_capacity(requests.len());
        for (tensor, to) in requests {
            places.entry((*tensor, to.ordinal())).or_insert(*to);
        }
        Self(places)
    }

    fn get(&self, tensor: usize, ordinal: u32) -> Option<DeviceMemory> {
        self.0.get(&(tensor, ordinal)).copied()
    }
}

/// Finds memory for moments.
struct Finder<'a, 'r> {
    reader: &'a Reader,
    wanted: &'r Places,
    found: Vec<WithMoments<'a>>,
    /// By depth and address, the moment whose values are there when that depth is decoded.
    places: HashMap<(usize, u64), usize>,
}

impl<'a> WithMoments<'a> {
    fn finder<'r>(reader: &'a Reader, wanted: &'r Places) -> Finder<'a, 'r> {
        Finder { reader, wanted, found: vec![], places: HashMap::new() }
    }
}

impl<'a> Finder<'a, '_> {
    /// Adds weights, if there is memory for all moments that their contexts are derived from.
    fn add(&mut self, request: usize, to: DeviceMemory, levels: Vec<Level<'a>>) -> Result<bool> {
        let (mut moments, mut places) = (vec![], vec![]);
        for (depth, level) in levels.iter().enumerate() {
            let found = match level.has_moment_contexts() {
                true => self.moments(depth, level, to.ordinal())?,
                false => Some(vec![]),
            };
            let Some(found) = found else { return Ok(false) };
            for place in &found {
                let (key, tensor) = ((depth, place.to.address()), place.tensor);
                if self.places.get(&key).is_some_and(|known| *known != tensor) {
                    return Ok(false);
                }
                places.push((key, tensor));
            }
            moments.push(found);
        }
        self.places.extend(places);
        self.found.push(WithMoments { request, to, levels, moments });
        Ok(true)
    }

    /// The moments of a level, and the memory for their values: where the checkpoint's own moments
    /// are requested. `None` if there is no memory for one.
    fn moments(
        &self,
        depth: usize,
        level: &Level<'a>,
        ordinal: u32,
    ) -> Result<Option<Vec<Place<'a>>>> {
        let numbers = level.reader.own_inputs(level.tensor, &level.block.side)?;
        let mut out = vec![];
        for tensor in numbers {
            let moment = &level.reader.tensors[tensor];
            let top = match depth {
                0 => Some(tensor),
                _ => self.reader.find(&moment.name).ok(),
            };
            // Its memory is free as long as ancestors are decoded, since it needs no other tensor
            // itself.
            let self_contained = |&top: &usize| self.reader.plan(top).own_inputs().next().is_none();
            let place = top.filter(self_contained).and_then(|t| self.wanted.get(t, ordinal));
            let fits = |to: &DeviceMemory| moment.bytes().is_ok_and(|bytes| bytes == to.bytes());
            let Some(to) = place.filter(fits) else { return Ok(None) };
            let levels = match depth {
                0 => vec![],
                _ => {
                    let levels = Levels::of(level.reader, tensor)?.for_device();
                    let levels = levels.filter(|l| !l.iter().any(Level::has_moment_contexts));
                    let Some(levels) = levels else { return Ok(None) };
                    levels
                }
            };
            out.push(Place { tensor, to, levels });
        }
        Ok(Some(out))
    }
}
