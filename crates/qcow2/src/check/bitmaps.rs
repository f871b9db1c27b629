//! The bitmaps of an image that is checked: what they refer to, and which of them cannot be used.
//!
//! Promises: a bitmap that cannot be used is given up by itself; what it seems to refer to is not
//! counted, so it costs no other structure anything. Bitmaps are checked last: one that lies on
//! what the header names is wrong, not what it lies on. Where it lies on what an L1 or L2 entry
//! names, either may be wrong, and nothing is given up (module `overlaps`). Memory is bounded: one
//! table at a time, of at most 8 MiB, and an entry for each cluster of the file that a bitmap has.

use std::collections::HashMap;

use crate::bitmaps::directory::{AUTO, FLAGS_AT, IN_USE};
use crate::check::image::Image;
use crate::check::report::{CheckHooks, CheckReport};
use crate::check::scan::{Holds, Scan};
use crate::check::source::Source;
use crate::check::stop::Stop;
use crate::check::tables::{self, BitmapEntry};
use crate::extensions::BitmapDirectory;
use crate::header::{self, Header};
use crate::limits::{CHECK_TABLES_BYTES_MAX, SECTOR};
use crate::units::{Bytes, HostCluster, HostOffset};

/// Bitmap directory of an image, where the image says that it may be believed.
fn directory(header: &Header) -> Option<BitmapDirectory> {
    header.extensions.bitmaps.filter(|_| header.autoclear & header::BITMAPS != 0)
}

/// The clusters of the bitmaps checked so far.
#[derive(Default)]
struct Seen {
    /// So many claims were there before, sorted.
    claims: usize,
    /// Number of the bitmap that has a cluster.
    clusters: HashMap<HostCluster, u32>,
    /// Bytes of tables.
    bytes: Bytes,
}

impl Scan {
    /// Counts what the bitmaps refer to, after everything else.
    pub(super) async fn bitmaps(
        &mut self,
        source: &impl Source,
        header: &Header,
        report: &mut CheckReport,
        hooks: CheckHooks<'_>,
    ) -> Result<(), Stop> {
        if let Some(reason) = &header.extensions.bitmaps_bad {
            self.lose_all(reason, report);
            return Ok(());
        }
        let Some(directory) = directory(header) else { return Ok(()) };
        let bitmaps = match tables::bitmaps(source, header, directory).await? {
            Ok(bitmaps) => bitmaps,
            Err(reason) => {
                self.lose_all(&reason, report);
                return Ok(());
            }
        };
        let mut seen = Seen { claims: self.claims.len(), ..Seen::default() };
        let mut places = self.clusters(directory.offset, directory.len);
        let on = places.find_map(|at| self.holder(at, seen.claims));
        if let Some(holds) = on {
            let at = directory.offset;
            self.lose_all(&format!("the bitmap directory at {at:#x} lies on {holds}"), report);
            return Ok(());
        }
        self.count(directory.offset, directory.len, "the bitmap directory", report)?;
        self.own(directory.offset, directory.len, Holds::Bitmaps);
        for (number, bitmap) in (0u32..).zip(&bitmaps) {
            hooks.step(self.done, self.total)?;
            if let Err(reason) = self.bitmap(source, number, bitmap, &mut seen, report).await? {
                let name = &bitmap.name;
                report.own_finding(1, || format!("ERROR bitmap '{name}' cannot be used: {reason}"));
                self.lost_bitmaps.add(number);
            }
        }
        let name = |number: &u32| bitmaps.get(*number as usize).map(|bitmap| bitmap.name.clone());
        self.lost_bitmaps.names = self.lost_bitmaps.numbers.iter().filter_map(name).collect();
        Ok(())
    }

    /// Counts one bitmap. The inner error says why it cannot be used; nothing of it is counted
    /// then.
    async fn bitmap(
        &mut self,
        source: &impl Source,
        number: u32,
        bitmap: &BitmapEntry,
        seen: &mut Seen,
        report: &mut CheckReport,
    ) -> Result<Result<(), String>, Stop> {
        if let Some(reason) = &bitmap.bad {
            return Ok(Err(reason.clone()));
        }
        let layout = self.layout;
        let bytes = Bytes(u64::from(bitmap.entries) * 8);
        seen.bytes += bytes;
        if seen.bytes > CHECK_TABLES_BYTES_MAX {
            return Err(Stop::Memory);
        }
        if bitmap.offset.checked_add(bytes).is_none_or(|end| end.from_start() > layout.exact_len) {
            return Ok(Err(format!("its table at {:#x} is not inside the file", bitmap.offset)));
        }
        let len = usize::try_from(bytes).map_err(|_| Stop::Memory)?;
        let raw = source.read("reading a bitmap table", bitmap.offset, len).await?;
        let words: Vec<u64> =
            raw.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)).collect();
        let places = match tables::bitmap_clusters(&words, layout) {
            Ok(places) => places,
            Err(reason) => return Ok(Err(reason)),
        };
        if let Some(at) = places.iter().find(|at| at.from_start() >= layout.exact_len) {
            return Ok(Err(format!("its bits at {at:#x} lie past the end of the file")));
        }
        let table = self.clusters(bitmap.offset, bytes);
        let own: Vec<HostCluster> =
            table.chain(places.iter().map(|at| *at >> layout.cluster_bits)).collect();
        if let Err(reason) = self.is_alone(&own, number, seen, report) {
            return Ok(Err(reason));
        }
        for cluster in own {
            let at = cluster << layout.cluster_bits;
            self.count(at, layout.cluster_size(), "a cluster of a bitmap", report)?;
            self.own(at, layout.cluster_size(), Holds::Bitmaps);
        }
        Ok(Ok(()))
    }

    /// Whether nothing else has the clusters of a bitmap.
    fn is_alone(
        &mut self,
        clusters: &[HostCluster],
        number: u32,
        seen: &mut Seen,
        report: &mut CheckReport,
    ) -> Result<(), String> {
        for cluster in clusters {
            let at = *cluster << self.layout.cluster_bits;
            if let Some(other) = seen.clusters.insert(*cluster, number) {
                // It is not known to which of them it belongs.
                if other != number {
                    self.lost_bitmaps.add(other);
                    report.own_finding(1, || {
                        format!("ERROR bitmap number {other} shares a cluster with another one")
                    });
                }
                return Err(format!("the cluster at {at:#x} belongs to a bitmap twice"));
            }
            if let Some(holds) = self.holder(*cluster, seen.claims) {
                return Err(format!("the cluster at {at:#x} holds {holds}"));
            }
        }
        Ok(())
    }

    fn lose_all(&mut self, reason: &str, report: &mut CheckReport) {
        self.lost_bitmaps.all = true;
        report.own_finding(1, || format!("ERROR bitmaps cannot be used: {reason}"));
    }

    fn clusters(
        &self,
        offset: HostOffset,
        len: Bytes,
    ) -> impl Iterator<Item = HostCluster> + use<> {
        let bits = self.layout.cluster_bits;
        let end = (offset + len).next_multiple_of(self.layout.cluster_size());
        (offset >> bits).up_to(end >> bits)
    }

    /// What a cluster holds that the header leads to. The first `sorted` claims are.
    fn holder(&self, cluster: HostCluster, sorted: usize) -> Option<&'static str> {
        let claims = self.claims.get(..sorted).unwrap_or_default();
        let first = claims.partition_point(|claim| claim.cluster < cluster);
        let here = claims.iter().skip(first).take_while(|claim| claim.cluster == cluster);
        let mut named = here.filter(|claim| {
            !matches!(claim.holds, Holds::L2 | Holds::RefcountBlock | Holds::Bitmaps)
        });
        named.next().map(|claim| claim.holds.words())
    }
}

/// Marks the bitmaps that record as inconsistent, durably: what a repair changes on the disk is not
/// in them. Returns what was done.
///
/// Errors: `Io`.
pub(super) async fn distrust(image: Image<'_>, scan: &Scan) -> Result<Vec<String>, Stop> {
    let lost = &scan.lost_bitmaps;
    let Some(directory) = directory(image.header).filter(|_| !lost.all) else {
        return Ok(Vec::new());
    };
    let reader = image.reader();
    let Ok(bitmaps) = tables::bitmaps(&reader, image.header, directory).await? else {
        return Ok(Vec::new());
    };
    let mut said = Vec::new();
    for (number, bitmap) in (0u32..).zip(&bitmaps) {
        let records = bitmap.flags & AUTO != 0 && bitmap.flags & IN_USE == 0;
        if !records || lost.numbers.binary_search(&number).is_ok() {
            continue;
        }
        let at = directory.offset + Bytes::of(bitmap.place.start + FLAGS_AT);
        let sector = at.align_down(SECTOR);
        // The last sector of the file may be cut.
        let len = usize::try_from(SECTOR.min(reader.len() - sector.from_start()))
            .map_err(|_| Stop::Memory)?;
        let mut content = reader.read("reading the bitmap directory", sector, len).await?;
        // Inside the sector: entries are aligned to 8.
        let place = usize::try_from(at - sector).unwrap_or(0);
        content[place..place + 4].copy_from_slice(&(bitmap.flags | IN_USE).to_be_bytes());
        image.write(sector, &content).await?;
        said.push(format!(
            "Repaired: bitmap '{}' is inconsistent now, as it knows nothing of what the repair \
             changes on the disk",
            bitmap.name
        ));
    }
    if !said.is_empty() {
        image.flush().await?;
    }
    Ok(said)
}

/// What takes the place of the bitmap directory when the lost bitmaps are left out.
pub(super) struct NewDirectory {
    /// The new one; empty when none is left.
    pub(super) bytes: Vec<u8>,
    pub(super) count: u32,
    /// Where the old one lies; `None`: it was not counted.
    pub(super) old: Option<BitmapDirectory>,
}

/// The bitmap directory without the lost bitmaps. `None`: none is lost.
///
/// Errors: `Io`.
pub(super) async fn new_directory(
    source: &impl Source,
    header: &Header,
    scan: &Scan,
) -> Result<Option<NewDirectory>, Stop> {
    let lost = &scan.lost_bitmaps;
    if lost.is_empty() {
        return Ok(None);
    }
    let gone = NewDirectory { bytes: Vec::new(), count: 0, old: None };
    let Some(old) = directory(header).filter(|_| !lost.all) else { return Ok(Some(gone)) };
    let Ok(entries) = tables::bitmaps(source, header, old).await? else { return Ok(Some(gone)) };
    let len = usize::try_from(old.len).map_err(|_| Stop::Memory)?;
    let bytes = source.read("reading the bitmap directory", old.offset, len).await?;
    let places: Vec<_> = entries.into_iter().map(|entry| entry.place).collect();
    let bytes = tables::without_bitmaps(&bytes, &places, &lost.numbers);
    // Not more than there were.
    let count = old.count - u32::try_from(lost.numbers.len()).unwrap_or(old.count).min(old.count);
    Ok(Some(NewDirectory { bytes, count, old: Some(old) }))
}
