//! The clusters that were decompressed last, so that reading one in small steps decompresses it
//! once.
//!
//! Called for compressed clusters only, by any thread; takes a lock for a short search and copies
//! nothing.

use super::{Cluster, Compressed};
use crate::limits::{RECENT_CLUSTERS_BYTES, RECENT_CLUSTERS_MAX, RECENT_CLUSTERS_MIN};
use crate::sync::{Mutex, lock};

/// The cache; the least recently used cluster goes first.
pub(crate) struct Recent {
    capacity: usize,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    /// Counts uses: the time of the cache.
    now: u64,
    clusters: Vec<Entry>,
}

struct Entry {
    key: Compressed,
    used: u64,
    data: Cluster,
}

impl Recent {
    pub(crate) fn new(cluster_size: usize) -> Recent {
        let capacity = RECENT_CLUSTERS_BYTES / cluster_size;
        Recent {
            capacity: capacity.clamp(RECENT_CLUSTERS_MIN, RECENT_CLUSTERS_MAX),
            entries: Mutex::new(Entries::default()),
        }
    }

    pub(crate) fn get(&self, key: Compressed) -> Option<Cluster> {
        let mut entries = lock(&self.entries);
        entries.now += 1;
        let now = entries.now;
        let entry = entries.clusters.iter_mut().find(|entry| entry.key == key)?;
        entry.used = now;
        Some(entry.data.clone())
    }

    pub(crate) fn put(&self, key: Compressed, data: Cluster) {
        let mut entries = lock(&self.entries);
        entries.now += 1;
        let entry = Entry { key, used: entries.now, data };
        let clusters = &mut entries.clusters;
        if clusters.len() < self.capacity {
            clusters.push(entry);
        } else if let Some(oldest) = clusters.iter_mut().min_by_key(|entry| entry.used) {
            *oldest = entry;
        }
    }
}
