//! The bytes of nodes and final chunks of the steps in hand, by name, and the numeric work on them.
//!
//! Nothing is copied that can be referred to: a leaf is one buffer whose chunks are slices of it, what arrives is folded from where it
//! lies, and a final chunk is written once, where others may read it.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes};
use collectives::reduce::{self, ChunkHeader};
use collectives::{Chunk, ChunkLayout, LeafReport};
use transport::Arena;
use types::{Step, TreeNode, VirtualRank, VirtualRanks};
use xxhash_rust::xxh3::xxh3_64;

/// The bytes of the steps in hand.
#[derive(Debug)]
pub(crate) struct Buffers {
    layout: ChunkLayout,
    virtual_ranks: VirtualRanks,
    arena: Arena,
    nodes: BTreeMap<(Step, Chunk, TreeNode), Value>,
    finals: BTreeMap<(Step, Chunk), Bytes>,
    bytes: usize,
}

/// What a node is worth in one chunk.
#[derive(Clone, Debug)]
enum Value {
    /// Little-endian f32 at a multiple of 4.
    Numbers {
        weight: u64,
        sum: Bytes,
    },
    Report(LeafReport),
}

/// The mean over all virtual ranks, the same bits on every member.
#[derive(Clone, Debug)]
pub struct Sum {
    /// The mean gradient.
    pub gradients: Vec<f32>,
    /// The means of what was reported, by name.
    pub reports: BTreeMap<String, f64>,
    /// Whether every element is finite.
    pub finite: bool,
    /// The sum of the squares of all elements, in f64: for gradient clipping that is equal on all members.
    pub square_sum: f64,
    /// The total weight that the sum was divided by.
    pub weight: u64,
}

/// All final chunks of a step, not copied yet.
#[derive(Debug)]
pub(crate) struct Finals {
    layout: ChunkLayout,
    virtual_ranks: VirtualRanks,
    chunks: Vec<(Chunk, Bytes)>,
}

impl Finals {
    /// Writes the mean gradient to `out`, and says the rest; its `gradients` are empty. What was copied is verified against the digest
    /// that came with it: memory that a peer shares may have changed since.
    pub(crate) fn write_to(&self, out: &mut [f32]) -> Result<Sum, String> {
        let mut sum = Sum {
            gradients: Vec::new(),
            reports: BTreeMap::new(),
            finite: true,
            square_sum: 0.0,
            weight: 0,
        };
        for (chunk, body) in &self.chunks {
            let (head, data) = split_final(body)?;
            let Some(range) = self.layout.range(*chunk) else {
                let report = LeafReport::decode(data).map_err(|e| e.to_string())?;
                sum.weight = report.weight();
                sum.reports = report.mean(self.virtual_ranks);
                continue;
            };
            let into = out.get_mut(range).ok_or("the buffer for the sum is too short")?;
            let into = reduce::as_bytes_mut(into);
            if into.len() != data.len() {
                return Err(format!("final chunk {chunk} has another length"));
            }
            into.copy_from_slice(data);
            let (finite, square_sum) = head.check(into, *chunk)?;
            sum.finite &= finite;
            sum.square_sum += square_sum;
        }
        Ok(sum)
    }

    /// How many elements [`Self::write_to`] writes.
    pub(crate) fn elements(&self) -> usize {
        self.layout.elements()
    }
}

/// What stands before the bytes of a final chunk.
#[derive(Clone, Copy)]
struct FinalHead {
    digest: u64,
    square_sum: [u8; 8],
    finite: [u8; 8],
}

impl FinalHead {
    fn of(header: ChunkHeader, data: &[u8]) -> Self {
        let square_sum = header.square_sum.to_le_bytes();
        let finite = u64::from(header.finite).to_le_bytes();
        Self { digest: digest(data, square_sum, finite), square_sum, finite }
    }

    fn encode(self) -> [u8; FINAL_HEAD_BYTES] {
        let mut bytes = [0; FINAL_HEAD_BYTES];
        bytes[..8].copy_from_slice(&self.digest.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.square_sum);
        bytes[16..].copy_from_slice(&self.finite);
        bytes
    }

    /// Whether these are the bytes that the owner made; then whether they are finite, and the sum of their squares.
    fn check(self, data: &[u8], chunk: Chunk) -> Result<(bool, f64), String> {
        if self.digest != digest(data, self.square_sum, self.finite) {
            return Err(format!("the digest of final chunk {chunk} is wrong"));
        }
        Ok((self.finite != [0; 8], f64::from_le_bytes(self.square_sum)))
    }
}

fn digest(data: &[u8], square_sum: [u8; 8], finite: [u8; 8]) -> u64 {
    // The numbers of the head are the seed of the whole: one pass over the data, and no copy of it.
    let head = xxh3_64(&[square_sum, finite].concat());
    xxhash_rust::xxh3::xxh3_64_with_seed(data, head)
}

fn split_final(body: &[u8]) -> Result<(FinalHead, &[u8]), String> {
    let (head, data) = body
        .split_first_chunk::<FINAL_HEAD_BYTES>()
        .ok_or_else(|| format!("a final of {} bytes", body.len()))?;
    let (parts, _) = head.as_chunks::<8>();
    let head =
        FinalHead { digest: u64::from_le_bytes(parts[0]), square_sum: parts[1], finite: parts[2] };
    Ok((head, data))
}

impl Buffers {
    pub(crate) fn new(layout: ChunkLayout, virtual_ranks: VirtualRanks, arena: Arena) -> Self {
        Self {
            layout,
            virtual_ranks,
            arena,
            nodes: BTreeMap::new(),
            finals: BTreeMap::new(),
            bytes: 0,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.finals.clear();
        self.bytes = 0;
    }

    /// Keeps a leaf's bytes in the chunks that want it.
    pub(crate) fn put_leaf(
        &mut self,
        step: Step,
        rank: VirtualRank,
        chunks: &[Chunk],
        leaf: (&Bytes, &LeafReport),
    ) {
        let (gradients, report) = leaf;
        for chunk in chunks {
            let value = match self.layout.range(*chunk) {
                Some(range) => {
                    let bytes = range.start * size_of::<f32>()..range.end * size_of::<f32>();
                    Value::Numbers { weight: report.weight(), sum: gradients.slice(bytes) }
                }
                None => Value::Report(report.clone()),
            };
            self.insert_node((step, *chunk, TreeNode::leaf(rank)), value);
        }
    }

    /// Whether the bytes of a node of this chunk can be right: checked before the machine hears of it.
    pub(crate) fn decode_node(
        &self,
        chunk: Chunk,
        weight: u64,
        body: Bytes,
    ) -> Result<NodeValue, String> {
        match self.layout.range(chunk) {
            Some(range) => {
                if body.len() != range.len() * size_of::<f32>() {
                    return Err(format!(
                        "chunk {chunk} has {} elements, not {} bytes",
                        range.len(),
                        body.len()
                    ));
                }
                // Carriers lay bodies so that they can be folded where they are; but that is not promised.
                let sum = if reduce::elements_of(&body).is_ok() {
                    body
                } else {
                    let mut aligned = self.arena.allocate(body.len());
                    aligned.copy_from_slice(&body);
                    aligned.freeze()
                };
                Ok(NodeValue(Value::Numbers { weight, sum }))
            }
            None if self.layout.has(chunk) => {
                Ok(NodeValue(Value::Report(LeafReport::decode(&body).map_err(|e| e.to_string())?)))
            }
            None => Err(format!("there is no chunk {chunk}")),
        }
    }

    pub(crate) fn put_node(&mut self, step: Step, chunk: Chunk, node: TreeNode, value: NodeValue) {
        self.insert_node((step, chunk, node), value.0);
    }

    /// The weight of a node, and the body of its frame.
    pub(crate) fn node_body(
        &self,
        step: Step,
        chunk: Chunk,
        node: TreeNode,
    ) -> Option<(u64, Bytes)> {
        Some(match self.nodes.get(&(step, chunk, node))? {
            Value::Numbers { weight, sum } => (*weight, sum.clone()),
            Value::Report(report) => (report.weight(), report.encode()),
        })
    }

    /// `parent` = `left` + `right`; the two are gone.
    pub(crate) fn fold(
        &mut self,
        (step, chunk): (Step, Chunk),
        left: TreeNode,
        right: TreeNode,
        parent: TreeNode,
    ) -> Result<(), String> {
        let taken = self.take_node((step, chunk, left)).zip(self.take_node((step, chunk, right)));
        let Some((left, right)) = taken else {
            return Err(format!("no bytes for {left} and {right}"));
        };
        let value = match (left, right) {
            (Value::Numbers { weight: a, sum: left }, Value::Numbers { weight: b, sum: right }) => {
                let mut sum = self.arena.allocate(left.len());
                let out = reduce::elements_of_mut(&mut sum).map_err(|e| e.to_string())?;
                let left = reduce::elements_of(&left).map_err(|e| e.to_string())?;
                let right = reduce::elements_of(&right).map_err(|e| e.to_string())?;
                reduce::add(left, right, out);
                Value::Numbers { weight: a.saturating_add(b), sum: sum.freeze() }
            }
            (Value::Report(a), Value::Report(b)) => {
                Value::Report(LeafReport::combine(&a, &b).map_err(|e| e.to_string())?)
            }
            _ => return Err("a report beside numbers".to_owned()),
        };
        self.insert_node((step, chunk, parent), value);
        Ok(())
    }

    /// Folds the cover, divides by the total weight, and keeps the final chunk.
    pub(crate) fn finish(
        &mut self,
        step: Step,
        chunk: Chunk,
        cover: &[TreeNode],
    ) -> Result<(), String> {
        let v = self.virtual_ranks;
        let values: Option<Vec<_>> =
            cover.iter().map(|n| Some((*n, self.nodes.get(&(step, chunk, *n))?))).collect();
        let values = values.ok_or_else(|| format!("the cover of chunk {chunk} has no bytes"))?;
        let mut numbers = BTreeMap::new();
        let mut reports = BTreeMap::new();
        let mut total = 0_u64;
        for (node, value) in &values {
            match value {
                Value::Numbers { weight, sum } => {
                    total = total.saturating_add(*weight);
                    numbers.insert(*node, reduce::elements_of(sum).map_err(|e| e.to_string())?);
                }
                Value::Report(report) => {
                    reports.insert(*node, report.clone());
                }
            }
        }
        let body = if let Some(range) = self.layout.range(chunk) {
            let mut body = self.arena.allocate(FINAL_HEAD_BYTES + range.len() * size_of::<f32>());
            let (head, data) = body.split_at_mut(FINAL_HEAD_BYTES);
            let out = reduce::elements_of_mut(data).map_err(|e| e.to_string())?;
            let header = reduce::fold_mean(v, &numbers, total, out).map_err(|e| e.to_string())?;
            head.copy_from_slice(&FinalHead::of(header, data).encode());
            body.freeze()
        } else {
            let report = LeafReport::fold_cover(v, &reports).map_err(|e| e.to_string())?;
            let data = report.encode();
            let header = ChunkHeader { finite: true, square_sum: 0.0 };
            let mut body = Vec::with_capacity(FINAL_HEAD_BYTES + data.len());
            body.put_slice(&FinalHead::of(header, &data).encode());
            body.put_slice(&data);
            body.into()
        };
        self.put_final(step, chunk, body);
        Ok(())
    }

    /// Whether a final chunk has its length. Its digest is verified too, unless that is done when it is copied out.
    pub(crate) fn check_final(
        &self,
        chunk: Chunk,
        body: &[u8],
        is_verified_later: bool,
    ) -> Result<(), String> {
        let (head, data) = split_final(body)?;
        match self.layout.range(chunk) {
            Some(range) if data.len() != range.len() * size_of::<f32>() => Err(format!(
                "final chunk {chunk} has {} bytes, not 4 × {}",
                data.len(),
                range.len()
            )),
            Some(_) if is_verified_later => Ok(()),
            Some(_) => head.check(data, chunk).map(drop),
            None => {
                head.check(data, chunk)?;
                LeafReport::decode(data).map(|_| ()).map_err(|e| e.to_string())
            }
        }
    }

    pub(crate) fn put_final(&mut self, step: Step, chunk: Chunk, body: Bytes) {
        self.bytes += body.len();
        if let Some(old) = self.finals.insert((step, chunk), body) {
            self.bytes -= old.len();
        }
    }

    pub(crate) fn final_body(&self, step: Step, chunk: Chunk) -> Option<Bytes> {
        self.finals.get(&(step, chunk)).cloned()
    }

    /// A step was applied, and all members are known to have applied the one before: what was dropped then may be written again.
    pub(crate) fn advance(&self) {
        self.arena.advance();
    }

    /// Forgets the nodes up to a step.
    pub(crate) fn drop_nodes(&mut self, step: Step) {
        let kept = self.nodes.split_off(&(
            Step(step.0.saturating_add(1)),
            Chunk(0),
            TreeNode::leaf(VirtualRank(0)),
        ));
        let gone = std::mem::replace(&mut self.nodes, kept);
        self.bytes -= gone.values().map(Value::bytes).sum::<usize>();
    }

    pub(crate) fn drop_finals(&mut self, step: Step) {
        let kept = self.finals.split_off(&(Step(step.0.saturating_add(1)), Chunk(0)));
        let gone = std::mem::replace(&mut self.finals, kept);
        self.bytes -= gone.values().map(Bytes::len).sum::<usize>();
    }

    /// The final chunks of a step of which all are here.
    pub(crate) fn finals(&self, step: Step) -> Result<Finals, String> {
        let chunks = self.layout.iter().map(|chunk| {
            let body = self.finals.get(&(step, chunk));
            body.map(|body| (chunk, body.clone()))
                .ok_or_else(|| format!("final chunk {chunk} is missing"))
        });
        let chunks = chunks.collect::<Result<_, String>>()?;
        Ok(Finals { layout: self.layout, virtual_ranks: self.virtual_ranks, chunks })
    }

    /// Bytes held, for metrics.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn insert_node(&mut self, name: (Step, Chunk, TreeNode), value: Value) {
        self.bytes += value.bytes();
        if let Some(old) = self.nodes.insert(name, value) {
            self.bytes -= old.bytes();
        }
    }

    fn take_node(&mut self, name: (Step, Chunk, TreeNode)) -> Option<Value> {
        let value = self.nodes.remove(&name)?;
        self.bytes -= value.bytes();
        Some(value)
    }
}

impl Value {
    fn bytes(&self) -> usize {
        match self {
            Self::Numbers { sum, .. } => sum.len(),
            Self::Report(_) => 64,
        }
    }
}

/// A checked value of a node.
#[derive(Debug)]
pub(crate) struct NodeValue(Value);

/// xxh3 digest of the rest, sum of squares, finite flag: a multiple of 8, so that elements stand where they can be added.
const FINAL_HEAD_BYTES: usize = 24;

#[cfg(test)]
mod tests {
    use super::*;

    fn two_leaves(buffers: &mut Buffers, v: VirtualRanks) {
        let report = LeafReport::new(1, BTreeMap::from([("loss".to_owned(), 2.0)])).unwrap();
        for rank in v.iter() {
            let chunks: Vec<Chunk> = (0..2).map(Chunk).collect();
            let leaf = [1.0, 2.0, 3.0 + rank.0 as f32];
            let mut bytes = buffers.arena.allocate(12);
            bytes.copy_from_slice(reduce::as_bytes(&leaf));
            buffers.put_leaf(Step(0), rank, &chunks, (&bytes.freeze(), &report));
        }
    }

    #[test]
    fn a_flipped_bit_in_a_final_is_noticed() {
        let v = VirtualRanks::new(2).unwrap();
        let mut buffers = Buffers::new(ChunkLayout::new(3, 1024).unwrap(), v, Arena::private());
        two_leaves(&mut buffers, v);
        let cover: Vec<TreeNode> = v.iter().map(TreeNode::leaf).collect();
        for chunk in (0..2).map(Chunk) {
            buffers.finish(Step(0), chunk, &cover).unwrap();
            let body = buffers.final_body(Step(0), chunk).unwrap();
            assert_eq!(buffers.check_final(chunk, &body, false), Ok(()));
            for at in 0..body.len() {
                let mut bad = body.to_vec();
                bad[at] ^= 1;
                assert!(buffers.check_final(chunk, &bad, false).is_err(), "byte {at}");
                // What is not verified on arrival is verified as it is copied out.
                let mut other = Buffers::new(buffers.layout, v, Arena::private());
                for chunk in (0..2).map(Chunk) {
                    other.put_final(
                        Step(0),
                        chunk,
                        buffers.final_body(Step(0), chunk).unwrap_or_default(),
                    );
                }
                other.put_final(Step(0), chunk, bad.into());
                let mut out = [0.0; 3];
                let copied = other.finals(Step(0)).unwrap().write_to(&mut out);
                assert!(copied.is_err() || chunk == Chunk(1), "byte {at}");
            }
        }
        let mut gradients = [0.0; 3];
        let sum = buffers.finals(Step(0)).unwrap().write_to(&mut gradients).unwrap();
        assert_eq!(gradients, [1.0, 2.0, 3.5]);
        assert_eq!((sum.reports["loss"], sum.weight, sum.finite), (2.0, 2, true));
    }

    #[test]
    fn the_bytes_held_are_counted_as_they_come_and_go() {
        let v = VirtualRanks::new(2).unwrap();
        let mut buffers = Buffers::new(ChunkLayout::new(3, 1024).unwrap(), v, Arena::private());
        two_leaves(&mut buffers, v);
        assert_eq!(buffers.bytes(), 2 * 12 + 2 * 64);
        let [left, right] = [0, 1].map(|rank| TreeNode::leaf(VirtualRank(rank)));
        let root = TreeNode::new(0, 1).unwrap();
        buffers.fold((Step(0), Chunk(0)), left, right, root).unwrap();
        assert_eq!(buffers.bytes(), 12 + 2 * 64);
        buffers.finish(Step(0), Chunk(0), &[root]).unwrap();
        assert_eq!(buffers.bytes(), 12 + 2 * 64 + FINAL_HEAD_BYTES + 12);
        buffers.drop_nodes(Step(0));
        buffers.drop_finals(Step(0));
        assert_eq!(buffers.bytes(), 0);
    }

    #[test]
    fn a_node_that_lies_askew_is_folded_all_the_same() {
        let v = VirtualRanks::new(2).unwrap();
        let mut buffers = Buffers::new(ChunkLayout::new(3, 1024).unwrap(), v, Arena::private());
        two_leaves(&mut buffers, v);
        let mut askew = vec![0];
        askew.extend_from_slice(reduce::as_bytes(&[5.0, 6.0, 7.0]));
        let right = TreeNode::leaf(VirtualRank(1));
        let value = buffers.decode_node(Chunk(0), 1, Bytes::from(askew).slice(1..)).unwrap();
        buffers.put_node(Step(0), Chunk(0), right, value);
        buffers.finish(Step(0), Chunk(0), &[TreeNode::leaf(VirtualRank(0)), right]).unwrap();
        let body = buffers.final_body(Step(0), Chunk(0)).unwrap();
        let mean: Vec<f32> = reduce::from_bytes(&body[FINAL_HEAD_BYTES..]).unwrap();
        assert_eq!(mean, [3.0, 4.0, 5.0]);
        assert!(buffers.decode_node(Chunk(0), 1, Bytes::from_static(&[0; 8])).is_err());
        assert!(buffers.decode_node(Chunk(7), 1, Bytes::new()).is_err());
    }
}
