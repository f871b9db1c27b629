//! Looks at a state that a power cut left: by the specification, by our check, by our engine, by
//! `qemu-img`.

use std::path::PathBuf;

use ringdisk_qcow2::{Bytes, CheckVerdict, GuestOffset, ImageBytes, OpenOptions, check_bytes};
use ringdisk_ring::{Errno, Runtime};
use ringdisk_testkit::layout::{Guest, Layout};
use ringdisk_testkit::limits::part_needs;
use ringdisk_testkit::oracle::{Content, Oracle};
use ringdisk_testkit::process::{command, has, run};
use ringdisk_testkit::sim::SimStorage;

use crate::bitmap;
use crate::common::runtime;
use crate::config::{Config, Medium};
use crate::live::{Base, buffer, open, read, writable};
use crate::world::Case;

/// A state, as our check wants it.
#[derive(Debug)]
struct Look<'a>(&'a SimStorage);

impl ImageBytes for Look<'_> {
    fn image_len(&self) -> Bytes {
        Bytes(self.0.len())
    }

    fn read_into(&self, offset: u64, out: &mut [u8]) {
        let count = self.0.peek(offset, out);
        out[count..].fill(0);
    }
}

/// One state of so many is shown to `qemu-img`.
const QEMU_EVERY: u64 = 200;
/// One state of so many is written to again.
const WRITE_EVERY: u64 = 8;

pub(crate) struct Judge {
    runtime: Runtime,
    directory: tempfile::TempDir,
    has_qemu: bool,
    /// States that were judged.
    pub(crate) judged: u64,
    /// Of these, shown to `qemu-img`.
    pub(crate) shown: u64,
    pub(crate) leaks: u64,
}

impl Judge {
    pub(crate) fn new() -> Judge {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let has_qemu = part_needs("qemu-img", has("qemu-img"));
        Judge { runtime: runtime(), directory, has_qemu, judged: 0, shown: 0, leaks: 0 }
    }

    /// Errors: what is wrong with the state.
    pub(crate) fn judge(&mut self, config: &Config, case: &Case) -> Result<(), String> {
        self.judged += 1;
        let layout = Layout::of(&case.file);
        if !layout.is_sound() {
            return Err(format!("by the specification: {:?}", layout.problems));
        }
        self.leaks += u64::from(layout.leaks > 0);
        let leaks = layout.leaks + layout.leaks_beyond;
        if case.closed && leaks > 0 {
            return Err(format!("{leaks} leaks after a clean close"));
        }
        self.our_check(case, &layout)?;
        let world = self.our_engine(config, case)?;
        self.snapshots(case, &layout)?;
        if config.shape.data_file_raw {
            raw_file(case, world)?;
        }
        if self.judged.is_multiple_of(WRITE_EVERY) || layout.header.dirty() {
            self.go_on(config, case, world.clone())?;
        }
        if self.judged.is_multiple_of(QEMU_EVERY) && !layout.header.dirty() && self.has_qemu {
            self.shown += 1;
            self.qemu(config, case)?;
        }
        Ok(())
    }

    fn our_check(&self, case: &Case, layout: &Layout) -> Result<(), String> {
        let report = check_bytes(&Look(&case.file)).map_err(|error| format!("check: {error}"))?;
        let good = matches!(report.verdict(), CheckVerdict::Clean | CheckVerdict::Leaks);
        if !good && !layout.header.dirty() {
            return Err(format!("check: {report:?}"));
        }
        if (report.leaks > 0) != (layout.leaks > 0) && !layout.header.dirty() {
            return Err(format!("check counts {} leaks, {} there are", report.leaks, layout.leaks));
        }
        Ok(())
    }

    /// Opens it with our engine; what is read must be one of the worlds, and the same as by the
    /// specification. Returns that world.
    fn our_engine<'a>(&mut self, config: &Config, case: &'a Case) -> Result<&'a Oracle, String> {
        let ring = self.runtime.ring().clone();
        let options = OpenOptions::default();
        let image = self.runtime.block_on(open(&ring, &case.file, case.data.as_ref(), &options));
        let image = image.map_err(|error| format!("it does not open: {error}"))?;
        let data = case.data.as_ref().unwrap_or(&case.file);
        let guest = Guest::active(&case.file, data)?;
        let base = Base(config.below);
        let mut wrong = Vec::new();
        let runtime = &mut self.runtime;
        for world in &case.expected.worlds {
            if guest.size != world.size() || image.virtual_size() != Bytes(world.size()) {
                wrong.push(format!("size {}, {}", guest.size, world.size()));
                continue;
            }
            let seen = world.judge_crash(|at, bytes| {
                let mut second = vec![0; bytes.len()];
                guest.read(at, &mut second, &|at, out| config.below.fill(at, out))?;
                let ours = runtime.block_on(read(&ring, &image, &base, at, bytes));
                ours.map_err(|errno| format!("reading {at:#x}: {errno}"))?;
                if bytes != second.as_slice() {
                    return Err(format!(
                        "engine and specification differ in {at:#x}+{}",
                        bytes.len()
                    ));
                }
                Ok(())
            });
            match seen {
                Ok(()) => {
                    if config.bitmap {
                        let judging = bitmap::judge(&ring, &image, case, world, |at, bytes| {
                            guest.read(at, bytes, &|at, out| config.below.fill(at, out))
                        });
                        self.runtime.block_on(judging)?;
                    }
                    return Ok(world);
                }
                Err(mismatch) => wrong.push(mismatch.to_string()),
            }
        }
        Err(wrong.join("\n  or "))
    }

    /// Snapshots that are there must be what they were.
    fn snapshots(&mut self, case: &Case, layout: &Layout) -> Result<(), String> {
        let found = |name: &&String| layout.snapshots.iter().any(|s| s.name == **name);
        if let Some(missing) = case.expected.required.iter().find(|name| !found(name)) {
            return Err(format!("the snapshot {missing:?} is gone"));
        }
        for snapshot in &layout.snapshots {
            let Some(world) = case.expected.snapshots.get(&snapshot.name) else {
                return Err(format!("a snapshot {:?} from nowhere", snapshot.name));
            };
            let guest = Guest::snapshot(&case.file, snapshot)?;
            if guest.size != world.size() {
                return Err(format!("snapshot {}: size {}", snapshot.name, guest.size));
            }
            let seen = world.judge_crash(|at, bytes| {
                guest.read(at, bytes, &|at, out| world.fill_below(at, out))
            });
            seen.map_err(|mismatch| format!("snapshot {}: {mismatch}", snapshot.name))?;
        }
        Ok(())
    }

    /// Opens it for writing and goes on.
    fn go_on(&mut self, config: &Config, case: &Case, mut world: Oracle) -> Result<(), String> {
        let (file, data) = (case.file.fork(1), case.data.as_ref().map(|data| data.fork(1)));
        let ring = self.runtime.ring().clone();
        let base = Base(config.below);
        world.restart();
        let regions: Vec<_> = config.regions.iter().filter(|r| r.end <= world.size()).collect();
        let work = async {
            let image = open(&ring, &file, data.as_ref(), &writable()).await?;
            for region in regions {
                // Across the first cluster border of each region.
                let at = (region.start + config.cluster()).saturating_sub(700);
                let range = at..(at + 1400).min(region.end);
                let begun = world.begin(range, Content::Stamped);
                let buf = buffer(&world.bytes(&begun));
                let result = image.write(&ring, GuestOffset(at), &buf, &base).await;
                world.end(&begun, result == Ok(buf.len()));
                // There may be no room for more on a full device.
                if config.medium != Medium::FullDevice || result != Err(Errno::NOSPC) {
                    result.map_err(|errno| format!("write: {errno}"))?;
                }
            }
            image.close(&ring).await.map_err(|errno| format!("close: {errno}"))
        };
        let done: Result<(), String> = self.runtime.block_on(work);
        done.map_err(|error| format!("going on: {error}"))?;
        world.settle();
        let was_dirty = Layout::of(&case.file).header.dirty();
        let layout = Layout::of(&file);
        if !layout.is_sound() || layout.header.dirty() || was_dirty && layout.leaks > 0 {
            let dirty = layout.header.dirty();
            return Err(format!(
                "after going on (dirty {dirty}, leaks {}): {:?}",
                layout.leaks, layout.problems
            ));
        }
        let guest = Guest::active(&file, data.as_ref().unwrap_or(&file))?;
        let seen = world
            .judge_crash(|at, bytes| guest.read(at, bytes, &|at, out| config.below.fill(at, out)));
        seen.map_err(|mismatch| format!("after going on: {mismatch}"))
    }

    fn qemu(&mut self, config: &Config, case: &Case) -> Result<(), String> {
        let path = self.dump(&case.file, "state.qcow2");
        if let Some(data) = &case.data {
            self.dump(data, "image.data");
        }
        if config.below.len > 0 {
            std::fs::File::create(self.directory.path().join("base"))
                .and_then(|file| file.set_len(config.below.len))
                .expect("a file");
        }
        let path = path.to_str().expect("UTF-8");
        let finished =
            run(command(&["qemu-img", "check", "-f", "qcow2", path])
                .current_dir(self.directory.path()));
        // 3: leaks only.
        match finished.code() {
            Some(0 | 3) => Ok(()),
            code => Err(format!("qemu-img check: {code:?}: {}", finished.output())),
        }
    }

    fn dump(&self, storage: &SimStorage, name: &str) -> PathBuf {
        let path = self.directory.path().join(name);
        std::fs::write(&path, storage.image()).expect("room for an image");
        path
    }
}

/// A data file that is a raw image holds the disk for those who do not know of the image: also
/// after a power cut.
fn raw_file(case: &Case, world: &Oracle) -> Result<(), String> {
    let data = case.data.as_ref().ok_or("no data file")?;
    let seen = world.judge_crash(|at, bytes| {
        let count = data.peek(at, bytes);
        bytes[count..].fill(0);
        Ok(())
    });
    seen.map_err(|mismatch| format!("the data file as a raw image: {mismatch}"))
}
