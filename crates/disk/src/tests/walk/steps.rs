//! Steps of a walk.

use ringdisk_qcow2::Bytes;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};
use ringdisk_throttle::{Limits, Rate, Rates};

use super::jobs::Fate;
use super::{CLIENTS, DEPTH_MAX, SIZE_MAX, Walk, opened};
use crate::tests::{assert_same, qemu_img, read_steps};
use crate::{
    BackupOptions, BackupSync, CheckpointOptions, CommitOptions, Disk, Errno, Error, ErrorKind,
    Format, ImageOptions, MirrorControl, MirrorEnd, MirrorOptions, MirrorSync, OnError,
    OverlayOptions, ResizeOptions, SnapshotChange, StreamOptions,
};

impl Walk {
    /// Makes a step. Returns what it was.
    pub(super) async fn step(&mut self) -> String {
        self.some().await;
        self.write_behind().await;
        match self.prng.below(24) {
            0..3 if self.depth() < DEPTH_MAX => self.overlay().await,
            3..6 if self.depth() > 1 => self.commit().await,
            6..8 if self.depth() > 1 => self.stream().await,
            8..12 => self.mirror().await,
            12 => self.failing_mirror().await,
            13 if self.depth() > 1 && self.frozen.is_none() => self.mirror_top().await,
            14..16 => self.resize().await,
            16 => self.limit(),
            17 if !self.is_raw() && self.frozen.is_none() => self.snapshot().await,
            18 => self.checkpoint().await,
            19..21 if self.frozen.is_none() => self.backup().await,
            21..23 if self.depth() > 3 => self.stream_beside_commit().await,
            _ => {
                assert_eq!(self.disk.flush(&self.ring).await, Ok(()));
                String::from("flush")
            }
        }
    }

    pub(super) fn below(&mut self, most: usize) -> usize {
        usize::try_from(self.prng.below(most as u64)).expect("small")
    }

    async fn overlay(&mut self) -> String {
        let name = self.new_name("qcow2");
        let path = self.path(&name);
        let added = self.disk.add_overlay(&self.ring, &path, OverlayOptions::default()).await;
        added.expect("an overlay");
        self.snapshots.clear();
        assert_eq!(self.names()[0], path);
        format!("overlay {name}")
    }

    async fn commit(&mut self) -> String {
        let before = self.names();
        let base = 1 + self.below(before.len() - 1);
        let options = CommitOptions { top: self.below(base), base, keep_top: false };
        let fate = self.fate();
        let job = self
            .spawn(async move |disk, ring, progress| disk.commit(&ring, options, &progress).await);
        self.meanwhile(&job, fate).await;
        let result = self.end(&job).await;
        let what = format!("commit {} into {base}, {fate:?}", options.top);
        // A snapshot inside a merged image, or the image above it, would show other bytes then.
        if let Err(error) = &result
            && matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Invalid)
            && self.may_have_snapshots()
        {
            assert_eq!(self.names(), before);
            return format!("{what}: {error}");
        }
        match self.judge(fate, result) {
            Some(()) => {
                assert_eq!(self.depth(), before.len() - (base - options.top));
                self.remove(&before);
            }
            None => assert_eq!(self.names(), before),
        }
        what
    }

    async fn stream(&mut self) -> String {
        let before = self.names();
        let base = match self.below(before.len()) {
            0 => None,
            at => Some(at),
        };
        let fate = self.fate();
        let options = StreamOptions { base };
        let job = self
            .spawn(async move |disk, ring, progress| disk.stream(&ring, options, &progress).await);
        self.meanwhile(&job, fate).await;
        let result = self.end(&job).await;
        let what = format!("stream down to {base:?}, {fate:?}");
        if let Err(error) = &result
            && error.kind() == ErrorKind::Invalid
            && self.may_have_snapshots()
        {
            assert_eq!(self.names(), before);
            return format!("{what}: {error}");
        }
        match self.judge(fate, result) {
            Some(()) => {
                assert_eq!(self.depth(), 1 + base.map_or(0, |base| before.len() - base));
                self.remove(&before);
            }
            None => assert_eq!(self.names(), before),
        }
        what
    }

    /// Both at once: down to an image that stays, and of images below that one.
    async fn stream_beside_commit(&mut self) -> String {
        let before = self.names();
        let depth = before.len();
        let base = 1 + self.below(depth - 3);
        let top = base + 1 + self.below(depth - 2 - base);
        let options =
            CommitOptions { top, base: top + 1 + self.below(depth - 1 - top), keep_top: false };
        let fates = [self.fate(), self.fate()];
        let down_to = StreamOptions { base: Some(base) };
        let stream = self
            .spawn(async move |disk, ring, progress| disk.stream(&ring, down_to, &progress).await);
        let commit = self
            .spawn(async move |disk, ring, progress| disk.commit(&ring, options, &progress).await);
        self.meanwhile(&stream, fates[0]).await;
        self.meanwhile(&commit, fates[1]).await;
        let mut left = depth;
        let counts = [base - 1, options.base - options.top];
        for ((job, fate), count) in [&stream, &commit].into_iter().zip(fates).zip(counts) {
            let result = self.end(job).await;
            let is_meant = |error: &Error| {
                let kind = error.kind();
                let is_of_snapshots = kind == ErrorKind::Unsupported || kind == ErrorKind::Invalid;
                (is_of_snapshots || kind == ErrorKind::Busy) && self.may_have_snapshots()
            };
            if !result.as_ref().is_err_and(is_meant) && self.judge(fate, result).is_some() {
                left -= count;
            }
        }
        assert_eq!(self.depth(), left);
        self.remove(&before);
        format!("stream down to {base} beside commit {top} into {}, {fates:?}", options.base)
    }

    /// Whether an image of the chain may have internal snapshots.
    fn may_have_snapshots(&self) -> bool {
        let mut images = self.disk.layers().into_iter();
        images.any(|layer| layer.qcow2().is_some_and(|image| !image.info().snapshots.is_empty()))
    }

    fn options(&mut self) -> MirrorOptions {
        MirrorOptions { write_blocking: self.prng.coin(), ..MirrorOptions::default() }
    }

    /// To another file: the disk switches over, the target is left, or the mirror is given up.
    async fn mirror(&mut self) -> String {
        let before = self.names();
        let format = if self.prng.coin() { "qcow2" } else { "raw" };
        let name = self.new_name(format);
        let path = self.path(&name);
        let size = self.disk.size().to_string();
        qemu_img(&self.directory, &["create", "-q", "-f", format, &name, &size]);
        let target = opened(&self.ring, path.clone()).await;
        let (pivots, fate, options) = (self.prng.below(3) > 0, self.fate(), self.options());
        let control = Arc::new(MirrorControl::new());
        let (shared, to) = (Arc::clone(&control), Arc::clone(&target));
        let job = self.spawn(async move |disk, ring, progress| {
            disk.mirror(&ring, to, options, &progress, &shared).await
        });
        let waits = self.prng.coin();
        if fate == Fate::Ends && waits {
            assert!(control.ready().await);
            self.some().await;
        }
        if fate == Fate::Ends || self.prng.coin() {
            control.complete(pivots).expect("it can be completed");
        }
        if fate == Fate::Ends && pivots && self.frozen.is_some() {
            // A switch-over waits for the end of the checkpoint.
            self.meanwhile(&job, fate).await;
            self.some().await;
            assert!(!job.is_over(), "a checkpoint is running");
            self.end_checkpoint().await;
        }
        self.meanwhile(&job, fate).await;
        let result = self.end(&job).await;
        let what = format!("mirror to {name}, switches over: {pivots}, {fate:?}");
        match self.judge(fate, result) {
            Some(MirrorEnd::Pivoted) => {
                assert_eq!(self.names(), [path]);
                self.snapshots.clear();
                self.remove(&before);
            }
            end => {
                assert_eq!(self.names(), before);
                if end.is_some() {
                    assert_eq!(target.close(&self.ring).await, Ok(()));
                }
                drop(target);
                if end.is_some() && format == "qcow2" {
                    qemu_img(&self.directory, &["check", "-q", "-f", "qcow2", &name]);
                }
                std::fs::remove_file(path).expect("nobody needs it");
            }
        }
        what
    }

    /// The target gets the bytes of the instant, whatever clients do meanwhile; or it is given up.
    async fn backup(&mut self) -> String {
        let before = self.names();
        let format = if self.prng.coin() { "qcow2" } else { "raw" };
        let name = self.new_name(format);
        let path = self.path(&name);
        let size = self.disk.size().to_string();
        qemu_img(&self.directory, &["create", "-q", "-f", format, &name, &size]);
        let target = opened(&self.ring, path.clone()).await;
        let fleece = SimStorage::new(0, 8).storage();
        let options = BackupOptions { sync: BackupSync::Full, fleece, fleece_max: Bytes(1 << 30) };
        self.halt().await;
        let then = self.bytes.clone();
        let backup = self.disk.begin_backup(&self.ring, target, options).await.expect("it begins");
        self.go_on();
        let fate = self.fate();
        let job = self.spawn(async move |_, _, progress| backup.run(&progress).await);
        self.meanwhile(&job, fate).await;
        let result = self.end(&job).await;
        assert_eq!(self.names(), before);
        let is_made = self.judge(fate, result).is_some();
        if is_made {
            let copy = opened(&self.ring, path.clone()).await;
            assert_same(&read_steps(&self.ring, &copy, 1 << 20).await, &then);
            assert_eq!(copy.close(&self.ring).await, Ok(()));
        }
        if format == "qcow2" {
            qemu_img(&self.directory, &["check", "-q", "-f", "qcow2", &name]);
        }
        std::fs::remove_file(path).expect("nobody needs it");
        format!("backup to {name}, {fate:?}")
    }

    /// To storage that fails now and then: clients see nothing of it.
    async fn failing_mirror(&mut self) -> String {
        let before = self.names();
        let small = self.prng.below(6) == 0;
        let len = if small { 1 << 20 } else { self.disk.size().0 };
        let sim = SimStorage::new(len, self.prng.below(1000));
        let fault = match self.prng.below(3) {
            0 => Fault::Fail(Errno::IO),
            1 => Fault::Fail(Errno::NOSPC),
            _ => Fault::Delay(Duration::from_millis(20)),
        };
        let kind = [OpKind::Write, OpKind::Flush][self.below(2)];
        sim.on(When::kind(kind).skip(self.prng.below(6)).once(), fault);
        let target = Disk::from_storage(sim.storage(), &ImageOptions::default());
        let on_error = [OnError::Report, OnError::Ignore][self.below(2)];
        let (fate, options) = (self.fate(), self.options());
        let control = Arc::new(MirrorControl::new());
        control.complete(false).expect("complete");
        let job = self.spawn(async move |disk, ring, progress| {
            progress.set_on_error(on_error);
            disk.mirror(&ring, target, options, &progress, &control).await
        });
        self.meanwhile(&job, fate).await;
        let what = match self.end(&job).await {
            Ok(MirrorEnd::Copied) => String::from("is whole"),
            Ok(MirrorEnd::Pivoted) => panic!("nobody has told it to"),
            Err(error) => {
                let kind = error.kind();
                let is_meant = match kind {
                    ErrorKind::Cancelled => fate == Fate::Cancelled,
                    ErrorKind::Invalid => small,
                    _ => on_error == OnError::Report,
                };
                assert!(is_meant, "{error}");
                error.to_string()
            }
        };
        assert_eq!(self.names(), before);
        format!("mirror to storage that fails, {on_error:?}, {fate:?}: {what}")
    }

    /// What the image on top has, to another one over the same images.
    async fn mirror_top(&mut self) -> String {
        let before = self.names();
        let below = before[1].file_name().expect("a name").to_string_lossy().into_owned();
        let format = self.disk.layers()[1].format().unwrap_or(Format::Qcow2).name();
        let name = self.new_name("qcow2");
        let size = self.disk.size().to_string();
        let create = ["create", "-q", "-f", "qcow2", "-u", "-b", &below, "-F", format];
        qemu_img(&self.directory, &[&create[..], &[&name, &size]].concat());
        let target = opened(&self.ring, self.path(&name)).await;
        let fate = self.fate();
        let write_blocking = self.prng.coin();
        let options = MirrorOptions { sync: MirrorSync::Top, write_blocking, left: None };
        let control = Arc::new(MirrorControl::new());
        control.complete(true).expect("complete");
        let job = self.spawn(async move |disk, ring, progress| {
            disk.mirror(&ring, target, options, &progress, &control).await
        });
        self.meanwhile(&job, fate).await;
        let result = self.end(&job).await;
        let path = self.path(&name);
        if self.judge(fate, result).is_some() {
            assert_eq!(self.names()[0], path);
            assert_eq!(self.names()[1..], before[1..]);
            self.snapshots.clear();
            self.remove(&before);
        } else {
            assert_eq!(self.names(), before);
            std::fs::remove_file(path).expect("nobody needs it");
        }
        format!("mirror of the top to {name}, {fate:?}")
    }

    async fn resize(&mut self) -> String {
        let room = (SIZE_MAX - CLIENTS) / 512;
        let size = CLIENTS + 512 * self.below(room + 1);
        let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
        let what = format!("resize to {size}");
        match self.disk.resize_with(&self.ring, Bytes::of(size), options).await {
            Ok(_) => self.bytes.resize(size, 0),
            Err(error) => {
                let smaller = size < self.bytes.len();
                let is_meant = self.frozen.is_some() && smaller || self.may_have_snapshots();
                assert!(is_meant, "{error}");
                return format!("{what}: {error}");
            }
        }
        what
    }

    fn limit(&mut self) -> String {
        let average = [0, 8000, 20_000][self.below(3)];
        let total = Rate { average, ..Rate::default() };
        let limits = Limits { iops: Rates { total, ..Rates::default() }, ..Limits::default() };
        self.disk.change_limits(|_| Ok(limits)).expect("it takes limits");
        format!("limit {average}")
    }

    /// An internal snapshot is taken, or one goes.
    async fn snapshot(&mut self) -> String {
        let is_more = self.snapshots.len() < 2 && self.prng.coin();
        let change = match self.snapshots.pop() {
            Some(name) if !is_more => SnapshotChange::Delete(name),
            kept => {
                self.snapshots.extend(kept);
                let name = format!("s{}", self.next);
                self.next += 1;
                self.snapshots.push(name.clone());
                SnapshotChange::Create(name)
            }
        };
        let what = format!("{change:?}");
        self.disk.snapshot(&self.ring, change).await.expect("a snapshot");
        what
    }

    /// A checkpoint begins, or the one that runs ends.
    async fn checkpoint(&mut self) -> String {
        if self.frozen.is_some() {
            self.look().await;
            self.end_checkpoint().await;
            return String::from("a checkpoint ends");
        }
        // What it shows has to be known.
        self.halt().await;
        let options = CheckpointOptions {
            copy_limit: Duration::from_secs(600),
            ..CheckpointOptions::new(SimStorage::new(0, 7).storage(), Bytes(1 << 30))
        };
        let prepared = self.disk.prepare_checkpoint(&self.ring, options).await.expect("prepared");
        let mut held = self.disk.hold(&self.ring, Duration::from_secs(60)).await.expect("held");
        let checkpoint = held.freeze(&prepared).expect("frozen");
        drop(held);
        self.frozen = Some((checkpoint, self.bytes.clone()));
        self.go_on();
        String::from("a checkpoint begins")
    }
}
