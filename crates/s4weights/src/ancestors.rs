//! A reader's parent: opened when its values are needed, checked, and read for the values that a
//! delta needs.

use std::collections::{HashMap, HashSet};
use std::iter;
use std::sync::Arc;

use s4_engine::{Expected, expected_of, moment_dtypes};
use s4_format::index::TensorKind;
use s4_format::limits::CHUNK_LOG2;
use s4_format::side::Side;
use s4_format::{DType, Digest};

use crate::error::{At, Error, ParentProblem, Result};
use crate::io::LOCAL_REQUEST;
use crate::parent::{Parent, ParentRange, ParentTensor, Snapshot, SnapshotTensor};
use crate::progress::Meter;
use crate::reader::{Reader, Want};

impl Reader {
    /// Hash of the parent's manifest, if this checkpoint is a delta.
    pub fn parent_digest(&self) -> Option<Digest> {
        self.manifest.parent.map(|p| p.manifest)
    }

    /// Sets the parent, instead of [`crate::ReadOptions::parents`] finding it when it is needed. A
    /// parent that is already set stays.
    ///
    /// # Errors
    /// [`Error::Parent`] if it is another checkpoint, [`Error::Argument`] if this one has none.
    pub fn set_parent(&self, parent: Arc<Self>) -> Result<()> {
        let checked = self.checked(None, parent)?;
        // Calls at the same time set the same checkpoint.
        let _ = self.parent.set(checked);
        Ok(())
    }

    /// The checksums of this checkpoint's values. With them, values that were read from the
    /// checkpoint and are still in memory can be the parent of the next one
    /// ([`crate::MemoryParent`]).
    ///
    /// # Errors
    /// As reading the index.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let mut tensors = HashMap::new();
        let hosts: Vec<usize> = (0..self.named())
            .filter(|&t| matches!(self.tensors[t].kind, TensorKind::Chunks { .. }))
            .collect();
        let blocks = self.blocks(&hosts)?;
        for number in hosts {
            let t = &self.tensors[number];
            let spec = self.spec(number, &blocks[&number]);
            let snapshot = SnapshotTensor {
                // A tensor table has at most 2^22 records.
                number: number as u32,
                dtype: t.dtype,
                shape: t.shape.clone(),
                bytes: t.bytes().at(&self.name)?,
                chunk_log2: spec.chunk_log2,
                needs_others: Parent::needs_others(self, number as u32),
                expected: Parent::expected(self, number as u32)?,
                checksums: blocks[&number].records.iter().map(|r| r.crc_raw).collect(),
            };
            tensors.insert(t.name.clone(), snapshot);
        }
        Ok(Snapshot { digest: self.digest(), depth: self.manifest.depth(), tensors })
    }

    fn problem(&self, tensor: Option<usize>, problem: ParentProblem) -> Error {
        Error::Parent {
            target: self.name.clone(),
            tensor: tensor.map(|t| self.label(t).to_owned()),
            parent: self.parent_digest().unwrap_or(self.digest()),
            problem,
        }
    }

    /// Checks that `found` is the parent. Depths fall by one along a chain and are bounded in every
    /// manifest, so that no chain is endless.
    fn checked(&self, tensor: Option<usize>, found: Arc<Self>) -> Result<Arc<Self>> {
        let Some(expected) = self.manifest.parent else {
            return Err(Error::Argument(format!("{}: the checkpoint has no parent", self.name)));
        };
        if found.stands_for.get() == Some(&expected) {
            return Ok(found);
        }
        if found.digest() != expected.manifest {
            return Err(self.problem(tensor, ParentProblem::OtherHash(found.digest())));
        }
        if found.manifest.depth() != expected.depth {
            let (expected, found) = (expected.depth, found.manifest.depth());
            return Err(self.problem(tensor, ParentProblem::Depth { expected, found }));
        }
        Ok(found)
    }

    /// The parent, which a tensor needs.
    fn parent_for(&self, tensor: usize) -> Result<&Arc<Self>> {
        if let Some(parent) = self.parent.get() {
            return Ok(parent);
        }
        let digest = self.parent_digest();
        let missing = || self.problem(Some(tensor), ParentProblem::Missing);
        let (resolve, digest) = self.options.parents.as_ref().zip(digest).ok_or_else(missing)?;
        let found = resolve(&digest).map_err(|e| match e {
            Error::Parent { .. } => e,
            other => self.problem(Some(tensor), ParentProblem::Unreadable(Box::new(other))),
        })?;
        let found = self.checked(Some(tensor), found)?;
        Ok(self.parent.get_or_init(|| found))
    }

    /// The parent, and the number of its tensor that a tensor's plan predicts from, which must have
    /// the same type and shape; `None` if the tensor is not a delta.
    pub(crate) fn input(&self, tensor: usize) -> Result<Option<(&Arc<Self>, usize)>> {
        let t = &self.tensors[tensor];
        let Some((_, number)) = self.plan(tensor).parent() else { return Ok(None) };
        let parent = self.parent_for(tensor)?;
        let Some(there) = parent.tensors[..parent.named()].get(number as usize) else {
            return Err(self.problem(Some(tensor), ParentProblem::NoTensor(number)));
        };
        if (there.dtype, &there.shape) != (t.dtype, &t.shape) {
            let (dtype, shape) = (there.dtype, there.shape.clone());
            return Err(self.problem(Some(tensor), ParentProblem::OtherShape { dtype, shape }));
        }
        Ok(Some((parent, number as usize)))
    }

    /// The numbers of the tensors of this checkpoint that decoding a tensor needs: the original of
    /// a copy, or the moments. All have as many values as the tensor.
    pub(crate) fn own_inputs(&self, tensor: usize, side: &Side) -> Result<Vec<usize>> {
        let dtypes = moment_dtypes(self.plan(tensor), side);
        match dtypes.map_err(|e| e.in_tensor(self.label(tensor))).at(&self.name)? {
            Some(dtypes) => self.moments(tensor, dtypes),
            None => Ok(self.own_input(tensor)?.into_iter().collect()),
        }
    }

    /// The moments of a tensor: they must have the dtypes that its side data says, and need
    /// no other tensors themselves.
    fn moments(
        &self,
        tensor: usize,
        (first, second): (DType, Option<DType>),
    ) -> Result<Vec<usize>> {
        let (values, plan) = (self.tensors[tensor].values().at(&self.name)?, self.plan(tensor));
        let numbers = plan.moments().iter().map(|input| input.tensor);
        for (number, dtype) in numbers.clone().zip(iter::once(first).chain(second)) {
            let moment = self.tensors[..self.named()].get(number as usize);
            let fits = moment.is_some_and(|m| {
                let self_contained = self.plan(number as usize).own_inputs().next().is_none();
                self_contained && m.dtype == dtype && m.values().is_ok_and(|n| n == values)
            });
            if !fits {
                let what = format!("tensor {number} is not its moment of dtype {dtype}");
                let e = s4_format::Error::corrupt(what).in_tensor(self.label(tensor));
                return Err(e).at(&self.name);
            }
        }
        Ok(numbers.map(|n| n as usize).collect())
    }

    /// The number of the tensor of this checkpoint that a tensor is a copy of: it has as many
    /// values of the same dtype, or of float32 if the copy is rounded. `None` if the tensor is not
    /// a copy.
    pub(crate) fn own_input(&self, tensor: usize) -> Result<Option<usize>> {
        let t = &self.tensors[tensor];
        let plan = self.plan(tensor);
        let Some(number) = plan.own_input() else { return Ok(None) };
        let input = self.tensors[..self.named()].get(number as usize);
        let bytes = t.bytes().at(&self.name)?;
        let (dtype, all) = (plan.copied_dtype(t.dtype), bytes * plan.input_scale());
        let fits = |input: &s4_format::index::Tensor| {
            Some(input.dtype) == dtype && input.bytes().is_ok_and(|b| b == all)
        };
        if input.is_some_and(fits) {
            return Ok(Some(number as usize));
        }
        let what = format!("not a copy of tensor {number}");
        let e = s4_format::Error::corrupt(what).in_tensor(self.label(tensor));
        Err(e).at(&self.name)
    }

    /// Finds the ancestors that tensors with chunks of their own need, and reads the blocks of all
    /// tensors involved.
    pub(crate) fn prepare(&self, hosts: &[usize]) -> Result<()> {
        self.prepare_within(hosts.iter().map(|&t| (t, *CHUNK_LOG2.end())).collect())
    }

    /// As [`Reader::prepare`], with a limit on each tensor's chunk size, in values, as a power of two.
    ///
    /// The tensors that a copy is read from, down to the base, must not have larger chunks than the copy. Every
    /// larger chunk would be decoded again for each chunk of the copy, and so would the chunks that it needs, so
    /// the work could double with each checkpoint.
    fn prepare_within(&self, hosts: Vec<(usize, u8)>) -> Result<()> {
        let above = self.prepare_beside(hosts)?;
        match self.parent.get() {
            Some(parent) if !above.is_empty() => parent.prepare_within(above),
            _ => Ok(()),
        }
    }

    /// As [`Reader::prepare_within`], but leaves out the parent's tensors and returns them.
    fn prepare_beside(&self, mut hosts: Vec<(usize, u8)>) -> Result<Vec<(usize, u8)>> {
        // The lowest limit of each tensor comes first.
        hosts.sort_unstable();
        hosts.dedup_by_key(|host| host.0);
        let blocks = self.blocks(&hosts.iter().map(|host| host.0).collect::<Vec<_>>())?;
        let (mut above, mut beside, mut moments) = (vec![], vec![], vec![]);
        for (t, most) in hosts {
            let (plan, chunk_log2) = (self.plan(t), self.spec(t, &blocks[&t]).chunk_log2);
            if chunk_log2 > most {
                let e = s4_format::Error::corrupt("chunks are larger than those of its copy");
                return Err(e.in_tensor(self.label(t))).at(&self.name);
            }
            if plan.inputs.is_empty() || blocks[&t].records.iter().all(|r| r.plain) {
                continue;
            }
            if let Some((parent, number)) = self.input(t)? {
                above.push((parent.host(number), most));
            }
            let own =
                self.own_inputs(t, &blocks[&t].side)?.into_iter().map(|number| self.host(number));
            match plan.has_moments() {
                true => moments.extend(own),
                false => beside.extend(own.map(|input| (input, chunk_log2))),
            }
        }
        if !beside.is_empty() {
            // Paths of inputs within a checkpoint are short: that was checked when it was opened.
            self.prepare_within(beside)?;
        }
        self.prepare_moments(moments)?;
        Ok(above)
    }

    /// As [`Reader::prepare`], for moments that contexts are derived from. Neither they nor the tensors that they
    /// are deltas of may need other tensors; this way the amount that is read grows at most with the square of the
    /// chain's length.
    fn prepare_moments(&self, mut hosts: Vec<usize>) -> Result<()> {
        hosts.sort_unstable();
        hosts.dedup();
        let needs = |&&t: &&usize| self.plan(t).own_inputs().next().is_some();
        if let Some(&t) = hosts.iter().find(needs) {
            let e = s4_format::Error::corrupt("moment needs other tensors");
            return Err(e.in_tensor(self.label(t))).at(&self.name);
        }
        let hosts: Vec<_> = hosts.into_iter().map(|t| (t, *CHUNK_LOG2.end())).collect();
        let above = if hosts.is_empty() { vec![] } else { self.prepare_beside(hosts)? };
        match self.parent.get() {
            Some(parent) if !above.is_empty() => {
                parent.prepare_moments(above.into_iter().map(|host| host.0).collect())
            }
            _ => Ok(()),
        }
    }

    /// Prepares the moments that applying deltas needs, except for those that are wanted as a whole
    /// themselves.
    pub(crate) fn prepare_applied(&self, wants: &[Want<'_>]) -> Result<()> {
        let given: HashSet<usize> =
            wants.iter().filter(|w| self.is_whole(w)).map(|w| w.tensor).collect();
        let mut moments = vec![];
        for want in wants {
            if self.plan(want.tensor).has_moments()
                && let Some(block) = self.block(want.tensor)?
            {
                moments.extend(self.own_inputs(want.tensor, &block.side)?);
            }
        }
        moments.retain(|t| !given.contains(t));
        self.prepare_moments(moments.into_iter().map(|t| self.host(t)).collect())
    }

    /// Whether this checkpoint, or a known ancestor, is slow to answer.
    pub(crate) fn any_remote(&self) -> bool {
        self.request_size() > LOCAL_REQUEST || self.parent.get().is_some_and(|p| p.any_remote())
    }
}

impl Parent for Reader {
    fn digest(&self) -> Digest {
        Self::digest(self)
    }

    fn depth(&self) -> u32 {
        self.manifest.depth()
    }

    fn find(&self, name: &str) -> Option<ParentTensor<'_>> {
        let number = Self::find(self, name).ok()?;
        let t = &self.tensors[number];
        Some(ParentTensor { number: u32::try_from(number).ok()?, dtype: t.dtype, shape: &t.shape })
    }

    fn read(&self, ranges: &mut [ParentRange<'_>]) -> Result<()> {
        let mut wants = vec![];
        for r in ranges {
            let tensor = r.tensor as usize;
            let all = self.tensors.get(tensor).map_or(Ok(0), |t| t.bytes()).at(&self.name)?;
            if r.first.checked_add(r.to.len() as u64).is_none_or(|end| end > all) {
                return Err(Error::Argument(format!(
                    "{}: range extends past the end of a tensor",
                    self.name
                )));
            }
            wants.push(Want { tensor, first: r.first, to: &mut *r.to });
        }
        let hosts = self.hosts(&wants);
        self.prepare(&hosts)?;
        let mut silent = Meter { callback: None, done: 0, total: 0 };
        if self.any_remote() {
            return self.fetch_all(wants, &mut silent);
        }
        let wants = self.fill_mixed(wants, &mut silent)?;
        self.fill(wants, &self.idle)
    }

    fn needs_others(&self, tensor: u32) -> bool {
        let Some(t) = self.tensors.get(tensor as usize) else { return true };
        let plan = self.plan(tensor as usize);
        if matches!(t.kind, TensorKind::Packed { .. }) {
            // Packs have no inputs.
            return false;
        }
        match (plan.own_inputs().next(), plan.parent()) {
            (Some(_), _) => true,
            (None, None) => false,
            (None, Some((_, above))) => self.parent_for(tensor as usize).map_or(true, |parent| {
                // Depths fall by one along a chain, and are bounded.
                parent.needs_others(above)
            }),
        }
    }

    fn expected(&self, tensor: u32) -> Result<Option<Arc<Expected>>> {
        let number = tensor as usize;
        let Some(t) = self.tensors.get(number) else { return Ok(None) };
        let plan = self.plan(number);
        if !plan.has_offsets() || !matches!(t.kind, TensorKind::Chunks { .. }) {
            return Ok(None);
        }
        let above = match self.input(number) {
            // Depths fall by one along a chain, and are bounded.
            Ok(Some((parent, above))) => parent.expected(above as u32)?,
            Ok(None) => None,
            // The index must be readable without the parent.
            Err(Error::Parent { .. }) => return Ok(None),
            Err(e) => return Err(e),
        };
        let Some(block) = self.block(number)? else { return Ok(None) };
        let stored = (t.dtype, &t.shape[..], &block.side);
        let expected = expected_of(plan, stored, above.as_deref());
        let expected = expected.map_err(|e| e.in_tensor(self.label(number)));
        Ok(expected.at(&self.name)?.map(Arc::new))
    }

    fn is_remote(&self) -> bool {
        self.any_remote()
    }

    fn frames_of(&self, tensor: u32) -> Option<&Reader> {
        let there = (tensor as usize) < self.named() && !self.any_remote();
        there.then_some(self)
    }
}
